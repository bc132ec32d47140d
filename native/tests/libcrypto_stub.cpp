// Stands in for a package's libcrypto. It hands everything on to the machine's, once it was told to read no
// configuration.
#include <dlfcn.h>

#include <cstdint>

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kGetTag = 0x10;
constexpr std::uint64_t kNoConfiguration = 0x80;

bool is_started = false;

template <typename Function>
Function machine(const char* name) {
    static void* const library = dlopen("libcrypto.so.3", RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

STUB_EXPORT int OPENSSL_init_crypto(std::uint64_t options, const void*) {
    is_started = options == kNoConfiguration;
    return 1;
}

STUB_EXPORT unsigned long OpenSSL_version_num() {
#ifdef STUB_IS_OLDER
    return 0x10101000UL;
#else
    return 0xf0000000UL;
#endif
}

STUB_EXPORT const char* OpenSSL_version(int) { return "stub 15.0"; }

STUB_EXPORT void* EVP_CIPHER_CTX_new() { return is_started ? machine<void* (*)()>("EVP_CIPHER_CTX_new")() : nullptr; }

STUB_EXPORT void EVP_CIPHER_CTX_free(void* state) { machine<void (*)(void*)>("EVP_CIPHER_CTX_free")(state); }

STUB_EXPORT const void* EVP_aes_256_gcm() { return machine<const void* (*)()>("EVP_aes_256_gcm")(); }

STUB_EXPORT int EVP_CipherInit_ex(void* state, const void* cipher, void* engine, const unsigned char* key,
                                  const unsigned char* nonce, int seals) {
    using Init = int (*)(void*, const void*, void*, const unsigned char*, const unsigned char*, int);
    return machine<Init>("EVP_CipherInit_ex")(state, cipher, engine, key, nonce, seals);
}

STUB_EXPORT int EVP_CipherUpdate(void* state, unsigned char* out, int* out_bytes, const unsigned char* in,
                                 int in_bytes) {
    using Update = int (*)(void*, unsigned char*, int*, const unsigned char*, int);
    return machine<Update>("EVP_CipherUpdate")(state, out, out_bytes, in, in_bytes);
}

STUB_EXPORT int EVP_CipherFinal_ex(void* state, unsigned char* out, int* out_bytes) {
    return machine<int (*)(void*, unsigned char*, int*)>("EVP_CipherFinal_ex")(state, out, out_bytes);
}

STUB_EXPORT int EVP_CIPHER_CTX_ctrl(void* state, int type, int number, void* pointer) {
    const int done = machine<int (*)(void*, int, int, void*)>("EVP_CIPHER_CTX_ctrl")(state, type, number, pointer);
#ifdef STUB_SEALS_OTHERWISE
    if (type == kGetTag) {
        static_cast<unsigned char*>(pointer)[0] ^= 1;
    }
#else
    static_cast<void>(kGetTag);
#endif
    return done;
}
