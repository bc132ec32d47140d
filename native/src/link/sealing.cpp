#include "link/sealing.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

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

namespace {

constexpr int kGetTag = 0x10, kSetTag = 0x11;
constexpr std::size_t kNonceBytes = 12;
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;  // lengths are ints there

Status refused(const char* what) { return {Code::failed, std::string("libcrypto: ") + what + " failed"}; }

}  // namespace

Result<Sealing> Sealing::make(const Libcrypto& library, const SealKey& key, Way way) {
    const CryptoCalls& calls = library.calls;
    void* state = calls.new_state();
    if (state == nullptr) {
        return refused("a new state");
    }
    Sealing made(&calls, state, way);
    if (calls.init(state, calls.aes_256_gcm(), nullptr, key.data(), nullptr, way == Way::seal) != 1) {
        return refused("taking the key");
    }
    return made;
}

Sealing::Sealing(Sealing&& other) noexcept
    : calls_(other.calls_), state_(std::exchange(other.state_, nullptr)), way_(other.way_), next_(other.next_) {}

Sealing& Sealing::operator=(Sealing&& other) noexcept {
    std::swap(calls_, other.calls_);
    std::swap(state_, other.state_);
    std::swap(way_, other.way_);
    std::swap(next_, other.next_);
    return *this;
}

Sealing::~Sealing() {
    if (state_ != nullptr) {
        calls_->free_state(state_);
    }
}

Status Sealing::begin() {
    if (next_ == std::numeric_limits<std::uint64_t>::max()) {
        return {Code::failed, "this key has sealed all that it may"};
    }
    std::array<std::uint8_t, kNonceBytes> nonce{};
    const std::uint64_t number = next_++;
    for (std::size_t byte = 0; byte < sizeof number; ++byte) {
        nonce[byte] = static_cast<std::uint8_t>(number >> (8 * byte));
    }
    const bool is_begun = calls_->init(state_, nullptr, nullptr, nullptr, nonce.data(), -1) == 1;
    return is_begun ? Status() : refused("a new piece");
}

Status Sealing::bind(std::span<const std::uint8_t> bytes) {
    int done = 0;
    const bool is_bound = calls_->update(state_, nullptr, &done, bytes.data(), static_cast<int>(bytes.size())) == 1;
    return is_bound ? Status() : refused("what a piece is bound to");
}

Status Sealing::run(std::span<const std::uint8_t> in, std::uint8_t* out) {
    while (!in.empty()) {
        const std::size_t size = std::min(in.size(), kMostAtOnce);
        int done = 0;
        if (calls_->update(state_, out, &done, in.data(), static_cast<int>(size)) != 1 ||
            done != static_cast<int>(size)) {
            return refused("a piece");
        }
        in = in.subspan(size);
        out += size;
    }
    return {};
}

Result<SealTag> Sealing::finish() {
    SealTag tag{};
    int done = 0;
    if (calls_->finish(state_, tag.data(), &done) != 1 ||
        calls_->control(state_, kGetTag, static_cast<int>(tag.size()), tag.data()) != 1) {
        return refused("the end of a piece");
    }
    return tag;
}

Status Sealing::check(const SealTag& tag) {
    SealTag wanted = tag, rest{};
    int done = 0;
    if (calls_->control(state_, kSetTag, static_cast<int>(wanted.size()), wanted.data()) != 1 ||
        calls_->finish(state_, rest.data(), &done) != 1) {
        return {Code::failed, "what came is not what was sealed"};
    }
    return {};
}

}  // namespace kvo
