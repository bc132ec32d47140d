# How every target of ours is compiled: language, warnings, sanitizers.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# What many files include is parsed once in a build for use, and under sanitizers, where it is half the time. The builds
# whose warnings are errors go without, and so find a missing #include: that of the core for Python's tests, and `make
# native-optimized`, which the campaign runs, of the native tests.
set(KVOFFLOAD_SHARES_HEADERS OFF)
if(KVOFFLOAD_SANITIZE)
  set(KVOFFLOAD_SHARES_HEADERS ON)
elseif(KVOFFLOAD_EXTENSION AND NOT KVOFFLOAD_WERROR AND NOT KVOFFLOAD_TESTS)
  set(KVOFFLOAD_SHARES_HEADERS ON)
endif()
# -fPIC for libraries and -fPIE for programs would part what shares a precompiled header. The extension has no programs.
if(KVOFFLOAD_EXTENSION OR NOT KVOFFLOAD_SHARES_HEADERS)
  set(CMAKE_POSITION_INDEPENDENT_CODE ON)
endif()
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

add_library(kvoffload_settings INTERFACE)
target_compile_options(kvoffload_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;-Wshadow>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees overlaps in every concatenation of strings that it inlines (its bug 105651).
  target_compile_options(kvoffload_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  # The same where <string> comes out of a precompiled header; the other builds keep these warnings.
  if(KVOFFLOAD_SHARES_HEADERS)
    target_compile_options(kvoffload_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds;-Wno-stringop-overflow>)
  endif()
endif()
if(KVOFFLOAD_WERROR)
  target_compile_options(kvoffload_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

if(KVOFFLOAD_SANITIZE)
  if(KVOFFLOAD_EXTENSION)
    message(FATAL_ERROR "KVOFFLOAD_SANITIZE is for the native tests; a Python process cannot load such an extension")
  endif()
  foreach(sanitizer IN LISTS KVOFFLOAD_SANITIZE)
    list(APPEND sanitize_flags -fsanitize=${sanitizer})
  endforeach()
  # -O1 and lines only in the debug information: half the time to compile.
  target_compile_options(kvoffload_settings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:${sanitize_flags};-fno-sanitize-recover=all;-fno-omit-frame-pointer;-O1;-g1;-UNDEBUG>)
  target_link_options(kvoffload_settings INTERFACE ${sanitize_flags})
endif()

# A fuzzer sees which branches an input takes.
if(KVOFFLOAD_FUZZ)
  target_compile_options(kvoffload_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()

# Headers of the standard library that many files include.
set(KVOFFLOAD_SHARED_HEADERS
  <algorithm> <array> <atomic> <bit> <cerrno> <chrono> <condition_variable> <cstdint> <cstdio> <cstring> <deque>
  <filesystem> <fstream> <functional> <limits> <list> <map> <memory> <mutex> <optional> <random> <set> <span> <sstream>
  <stdexcept> <string> <string_view> <system_error> <thread> <utility> <vector>)

# Compiles each folder of a library as one file, but for what is compiled for other processors, and for benchmarks, which
# share no names. To be called where its sources are listed.
function(kvoffload_join_files library)
  set_target_properties(${library} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${library} SOURCES)
  foreach(source IN LISTS sources)
    if(NOT source MATCHES "_(x86|arm)[.]cpp$|/bench/")
      get_filename_component(folder ${source} DIRECTORY)
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder})
    endif()
  endforeach()
  # GCC takes a class of one of the files for one that other files see.
  target_compile_options(${library} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()

# The core's precompiled headers, which these targets reuse: they are compiled with the same flags.
function(kvoffload_share_headers)
  if(NOT KVOFFLOAD_SHARES_HEADERS)
    return()
  endif()
  target_precompile_headers(kvoffload_core PRIVATE ${KVOFFLOAD_SHARED_HEADERS})
  foreach(target IN LISTS ARGN)
    target_precompile_headers(${target} REUSE_FROM kvoffload_core)
  endforeach()
endfunction()
