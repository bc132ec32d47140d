#include "shim/dynamic_library.hpp"

#include <dlfcn.h>

namespace kvo {

Result<DynamicLibrary> DynamicLibrary::open(const std::string& name) {
    void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) {
        const char* const reason = dlerror();  // the loader's text of this thread
        return Status(Code::unavailable, reason != nullptr ? reason : name + " cannot be opened");
    }
    return DynamicLibrary(handle);
}

void* DynamicLibrary::find(const char* symbol) const noexcept { return dlsym(handle_, symbol); }

std::string DynamicLibrary::file_of(const void* function) {
    Dl_info found{};
    return dladdr(function, &found) != 0 && found.dli_fname != nullptr ? found.dli_fname : "";
}

}  // namespace kvo
