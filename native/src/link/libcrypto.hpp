// A libcrypto and what of it is called, found at run time: its owner keeps it up to date, we don't.
#pragma once

#include <string>

#include "base/status.hpp"

namespace kvo {

// The functions of libcrypto that we call, as it has declared them since version 1.1; its types are opaque there, too.
struct CryptoCalls {
    void* (*new_state)() = nullptr;
    void (*free_state)(void*) = nullptr;
    const void* (*aes_256_gcm)() = nullptr;
    int (*init)(void*, const void* cipher, void* engine, const unsigned char* key, const unsigned char* nonce,
                int seals) = nullptr;
    int (*update)(void*, unsigned char* out, int* out_bytes, const unsigned char* in, int in_bytes) = nullptr;
    int (*finish)(void*, unsigned char* out, int* out_bytes) = nullptr;
    int (*control)(void*, int type, int number, void* pointer) = nullptr;
};

struct Libcrypto {
    CryptoCalls calls;
    unsigned long version = 0;  // a newer one has a larger number
    std::string name;           // with its version, in its own words
    std::string file;
};

// Opens the library of this name, as the loader finds it, or of this file. Code::unavailable: there is none, or it
// cannot seal.
Result<Libcrypto> open_libcrypto(const std::string& name);

// Returns the machine's library, which seals all links; it lives as long as the process. Any thread may call it.
// Code::unavailable: the machine has none.
Result<const Libcrypto*> machine_libcrypto();

}  // namespace kvo
