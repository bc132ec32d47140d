# Kernels: nvcc makes one fat binary, src/copy/kernel_image.cpp embeds it. nvcc is called by hand because CMake's own CUDA support
# would make the toolkit a condition of the whole build.

# Machine code for the data centre parts (Ampere, Hopper, Blackwell; each runs on the later members of its family too),
# and PTX of the oldest, which the driver compiles at load for everything else from there on (sm_120 among them).
set(KVOFFLOAD_KERNEL_SM 80 90 100)
set(KVOFFLOAD_KERNEL_PTX 80)
# nvcc asks a host compiler to preprocess, and knows few. What is kept of it is the GPU's code alone, so any will do.
set(KVOFFLOAD_NVCC_CXX "" CACHE STRING "The host compiler that nvcc uses, if not the one that compiles the rest")

function(kvoffload_nvcc_flags out_flags out_archs)
  foreach(sm IN LISTS KVOFFLOAD_KERNEL_SM)
    list(APPEND flags -gencode arch=compute_${sm},code=sm_${sm})
    list(APPEND archs sm_${sm})
  endforeach()
  foreach(ptx IN LISTS KVOFFLOAD_KERNEL_PTX)
    list(APPEND flags -gencode arch=compute_${ptx},code=compute_${ptx})
    list(APPEND archs ptx_${ptx})
  endforeach()
  set(host ${CMAKE_CXX_COMPILER})
  if(KVOFFLOAD_NVCC_CXX)
    set(host ${KVOFFLOAD_NVCC_CXX})
  endif()
  list(APPEND flags -std=c++20 -O3 -ccbin ${host} -I${PROJECT_SOURCE_DIR}/src)
  set(${out_flags} ${flags} PARENT_SCOPE)
  set(${out_archs} ${archs} PARENT_SCOPE)
endfunction()

# nvcc's path if it is there and can compile for every architecture above; else empty, with the reason.
function(kvoffload_find_nvcc out_nvcc out_problem)
  set(${out_nvcc} "" PARENT_SCOPE)
  # CUDA_HOME, then PATH; nowhere else, so that whoever builds decides.
  find_program(KVOFFLOAD_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin NO_CMAKE_SYSTEM_PATH)
  if(NOT KVOFFLOAD_NVCC)
    set(${out_problem} "no nvcc in PATH or CUDA_HOME" PARENT_SCOPE)
    return()
  endif()
  # A nvcc may be too old for an architecture, refuse the C++ compiler, or lack half its parts. Trying is the only test.
  kvoffload_nvcc_flags(flags archs)
  set(trial ${PROJECT_BINARY_DIR}/nvcc_trial)
  file(WRITE ${trial}.cu "#include <cstdint>\nextern \"C\" __global__ void trial(std::uint64_t* out) { *out = 1; }\n")
  execute_process(
    COMMAND ${KVOFFLOAD_NVCC} ${flags} -fatbin ${trial}.cu -o ${trial}.fatbin
    RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    set(${out_problem} "${KVOFFLOAD_NVCC} fails:\n${output}" PARENT_SCOPE)
    return()
  endif()
  set(${out_nvcc} ${KVOFFLOAD_NVCC} PARENT_SCOPE)
endfunction()

# Adds the kernels to the core if KVOFFLOAD_CUDA wants them and nvcc can.
function(kvoffload_embed_kernels)
  if(KVOFFLOAD_CUDA STREQUAL "OFF")
    message(STATUS "kernels: off")
    return()
  elseif(NOT KVOFFLOAD_CUDA MATCHES "^(AUTO|ON)$")
    message(FATAL_ERROR "KVOFFLOAD_CUDA is AUTO, ON or OFF, not '${KVOFFLOAD_CUDA}'")
  endif()
  kvoffload_find_nvcc(nvcc problem)
  if(NOT nvcc)
    if(KVOFFLOAD_CUDA STREQUAL "ON")
      message(FATAL_ERROR "kernels: ${problem}")
    elseif(KVOFFLOAD_NVCC)
      message(WARNING "kernels: left out, ${problem}")
    else()
      message(STATUS "kernels: left out, ${problem}")
    endif()
    return()
  endif()

  kvoffload_nvcc_flags(flags archs)
  message(STATUS "kernels: ${archs}")
  set(source ${PROJECT_SOURCE_DIR}/src/copy/copy_runs.cu)
  set(image ${PROJECT_BINARY_DIR}/kernels.fatbin)
  add_custom_command(
    OUTPUT ${image}
    COMMAND ${nvcc} ${flags} -fatbin ${source} -o ${image} -MD -MF ${image}.d
    DEPENDS ${source} DEPFILE ${image}.d
    COMMENT "nvcc: kernels.fatbin" VERBATIM COMMAND_EXPAND_LISTS)

  list(JOIN archs "," archs)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/src/copy/kernel_image.cpp PROPERTIES
    OBJECT_DEPENDS ${image}
    COMPILE_DEFINITIONS "KVO_KERNEL_ARCHS=\"${archs}\";KVO_KERNEL_FILE=\"${image}\"")
endfunction()
