// A libcrypto and what of it is called, found at run time: its owner keeps it up to date, we don't.
#pragma once

#include <string>

#include "base/status.hpp"

namespace kvo {

// As libcrypto has declared them since version 1.1; its types are opaque there, too.
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

// The machine's, as the loader finds it, with the machine's configuration. Code::unavailable: it has none.
Result<Libcrypto> open_machine_libcrypto();

// The one of this file. It reads no configuration: where to look for one, and for modules that it may name, was said
// on whatever machine the file was built on. Code::unavailable: it is none.
Result<Libcrypto> open_packaged_libcrypto(const std::string& file);

}  // namespace kvo
