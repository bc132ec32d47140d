#include "link/libcrypto.hpp"

#include <array>
#include <cstdint>

#include "shim/dynamic_library.hpp"

namespace kvo {
namespace {

constexpr std::array kNames = {"libcrypto.so.3", "libcrypto.so.1.1"};
constexpr int kNameText = 0;                      // OPENSSL_VERSION
constexpr std::uint64_t kNoConfiguration = 0x80;  // OPENSSL_INIT_NO_LOAD_CONFIG

template <typename Function>
bool find(const DynamicLibrary& library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(library.find(name));
    return function != nullptr;
}

Result<Libcrypto> open(const std::string& name, bool reads_configuration) {
    const Result<DynamicLibrary> opened = DynamicLibrary::open(name);
    if (!opened.ok()) {
        return opened.fault();
    }
    const DynamicLibrary& library = opened.value();
    Libcrypto found;
    int (*start)(std::uint64_t options, const void* settings) = nullptr;
    unsigned long (*number)() = nullptr;
    const char* (*text)(int) = nullptr;
    if (!find(library, "EVP_CIPHER_CTX_new", found.calls.new_state) ||
        !find(library, "EVP_CIPHER_CTX_free", found.calls.free_state) ||
        !find(library, "EVP_aes_256_gcm", found.calls.aes_256_gcm) ||
        !find(library, "EVP_CipherInit_ex", found.calls.init) ||
        !find(library, "EVP_CipherUpdate", found.calls.update) ||
        !find(library, "EVP_CipherFinal_ex", found.calls.finish) ||
        !find(library, "EVP_CIPHER_CTX_ctrl", found.calls.control) || !find(library, "OPENSSL_init_crypto", start) ||
        !find(library, "OpenSSL_version_num", number) || !find(library, "OpenSSL_version", text)) {
        return Status(Code::unavailable, name + " lacks AES-GCM");
    }
    if (!reads_configuration && start(kNoConfiguration, nullptr) != 1) {
        return Status(Code::unavailable, name + " does not start");
    }
    found.version = number();
    found.name = text(kNameText);
    found.file = DynamicLibrary::file_of(reinterpret_cast<const void*>(number));
    return found;
}

}  // namespace

Result<Libcrypto> open_machine_libcrypto() {
    Result<Libcrypto> found = Status(Code::unavailable, "no libcrypto");
    for (const char* name : kNames) {
        found = open(name, true);
        if (found.ok()) {
            break;
        }
    }
    return found;
}

Result<Libcrypto> open_packaged_libcrypto(const std::string& file) { return open(file, false); }

}  // namespace kvo
