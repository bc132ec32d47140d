#include "link/seal_library.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "link/sealing.hpp"

namespace kvo {
namespace {

using Bytes = std::vector<std::uint8_t>;

// Of the code for many blocks, for few, and for what is left over.
constexpr std::array<std::size_t, 8> kSizes = {1, 15, 16, 17, 255, 1024, 5000, (128 << 10) + 3};

const Result<Libcrypto>& machine() {
    static const Result<Libcrypto> found = open_machine_libcrypto();
    return found;
}

std::atomic<const Libcrypto*> packaged{nullptr};

// Of one library, and what the other one makes of it. What was changed must not open.
bool agrees(const Libcrypto& seals, const Libcrypto& opens) {
    SealKey key;
    std::iota(key.begin(), key.end(), std::uint8_t{1});
    Result<Sealing> sealing = Sealing::make(seals, key, Sealing::Way::seal);
    Result<Sealing> opening = Sealing::make(opens, key, Sealing::Way::open);
    Result<Sealing> spoiled = Sealing::make(opens, key, Sealing::Way::open);
    if (!sealing.ok() || !opening.ok() || !spoiled.ok()) {
        return false;
    }
    for (const std::size_t size : kSizes) {
        Bytes plain(size), sealed(size), opened(size);
        std::iota(plain.begin(), plain.end(), std::uint8_t{3});
        if (!sealing.value().begin().ok() || !sealing.value().run(plain, sealed.data()).ok()) {
            return false;
        }
        const Result<SealTag> tag = sealing.value().finish();
        if (!tag.ok() || !opening.value().begin().ok() || !opening.value().run(sealed, opened.data()).ok() ||
            !opening.value().check(tag.value()).ok() || opened != plain) {
            return false;
        }
        sealed[size / 2] ^= 1;
        if (!spoiled.value().begin().ok() || !spoiled.value().run(sealed, opened.data()).ok() ||
            spoiled.value().check(tag.value()).ok()) {
            return false;
        }
    }
    return true;
}

// NIST's GCM vector: key, nonce and 16 bytes of zeros.
bool is_standard(const Libcrypto& library) {
    constexpr std::array<std::uint8_t, 16> kText = {0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e,
                                                    0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18};
    constexpr SealTag kTag = {0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0,
                              0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
    constexpr std::array<std::uint8_t, 16> kPlain{};
    std::array<std::uint8_t, 16> sealed{}, opened{};
    opened.fill(1);
    Result<Sealing> sealing = Sealing::make(library, SealKey{}, Sealing::Way::seal);
    Result<Sealing> opening = Sealing::make(library, SealKey{}, Sealing::Way::open);
    if (!sealing.ok() || !opening.ok() || !sealing.value().begin().ok() ||
        !sealing.value().run(kPlain, sealed.data()).ok()) {
        return false;
    }
    const Result<SealTag> tag = sealing.value().finish();
    return tag.ok() && tag.value() == kTag && sealed == kText && opening.value().begin().ok() &&
           opening.value().run(kText, opened.data()).ok() && opening.value().check(kTag).ok() && opened == kPlain;
}

Status judge(const Libcrypto& found, const Result<Libcrypto>& ours) {
    if (!is_standard(found) || !agrees(found, found)) {
        return {Code::unavailable, found.name + " does not seal as the standard says"};
    }
    if (ours.ok() && (!agrees(found, ours.value()) || !agrees(ours.value(), found))) {
        return {Code::unavailable, found.name + " and this machine's " + ours.value().name + " do not agree"};
    }
    return {};
}

}  // namespace

Result<const Libcrypto*> seal_library() {
    if (const Libcrypto* const found = packaged.load(std::memory_order_acquire)) {
        return found;
    }
    if (!machine().ok()) {
        return machine().fault();
    }
    return &machine().value();
}

Result<bool> use_seal_library(const std::string& file) {
    static std::mutex lock;
    if (!file.starts_with('/')) {
        return Status(Code::invalid, "a libcrypto is named by its absolute path, not " + file);
    }
    const std::lock_guard guard(lock);
    if (const Libcrypto* const used = packaged.load(std::memory_order_relaxed)) {
        if (used->file != file) {
            return Status(Code::invalid, used->file + " is in use");
        }
        return true;
    }
    Result<Libcrypto> found = open_packaged_libcrypto(file);
    if (!found.ok()) {
        return found.fault();
    }
    if (machine().ok() && found.value().version <= machine().value().version) {
        return false;
    }
    if (Status status = judge(found.value(), machine()); !status.ok()) {
        return status;
    }
    // Never freed: a thread may seal for as long as the process lives.
    packaged.store(new Libcrypto(std::move(found.value())), std::memory_order_release);
    return true;
}

}  // namespace kvo
