#include "link/libcrypto.hpp"

#include <array>

#include "shim/dynamic_library.hpp"

namespace kvo {
namespace {

constexpr std::array kNames = {"libcrypto.so.3", "libcrypto.so.1.1"};
constexpr int kNameText = 0;  // OPENSSL_VERSION

template <typename Function>
bool find(const DynamicLibrary& library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(library.find(name));
    return function != nullptr;
}

Result<Libcrypto> open_first() {
    Result<Libcrypto> found = Status(Code::unavailable, "no libcrypto");
    for (const char* name : kNames) {
        found = open_libcrypto(name);
        if (found.ok()) {
            break;
        }
    }
    return found;
}

}  // namespace

Result<Libcrypto> open_libcrypto(const std::string& name) {
    const Result<DynamicLibrary> opened = DynamicLibrary::open(name);
    if (!opened.ok()) {
        return opened.fault();
    }
    const DynamicLibrary& library = opened.value();
    Libcrypto found;
    unsigned long (*number)() = nullptr;
    const char* (*text)(int) = nullptr;
    if (!find(library, "EVP_CIPHER_CTX_new", found.calls.new_state) ||
        !find(library, "EVP_CIPHER_CTX_free", found.calls.free_state) ||
        !find(library, "EVP_aes_256_gcm", found.calls.aes_256_gcm) ||
        !find(library, "EVP_CipherInit_ex", found.calls.init) ||
        !find(library, "EVP_CipherUpdate", found.calls.update) ||
        !find(library, "EVP_CipherFinal_ex", found.calls.finish) ||
        !find(library, "EVP_CIPHER_CTX_ctrl", found.calls.control) || !find(library, "OpenSSL_version_num", number) ||
        !find(library, "OpenSSL_version", text)) {
        return Status(Code::unavailable, name + " lacks AES-GCM");
    }
    found.version = number();
    found.name = text(kNameText);
    found.file = DynamicLibrary::file_of(reinterpret_cast<const void*>(number));
    return found;
}

Result<const Libcrypto*> machine_libcrypto() {
    static const Result<Libcrypto> found = open_first();
    if (!found.ok()) {
        return found.fault();
    }
    return &found.value();
}

}  // namespace kvo
