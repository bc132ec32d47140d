#include "link/sealing.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"

using namespace kvo;

TEST(the_machines_says_its_version_and_its_file) {
    const Result<const Libcrypto*> found = machine_libcrypto();
    CHECK(found.ok());
    CHECK(found.value()->version >= 0x10100000UL);
    CHECK(found.value()->name.starts_with("OpenSSL "));
    CHECK(found.value()->file.find("/libcrypto.so") != std::string::npos);
    CHECK(machine_libcrypto().value() == found.value());
}

TEST(a_file_that_is_not_a_libcrypto_is_unavailable) {
    for (const char* const file : {"/nowhere/libcrypto.so.3", "libm.so.6"}) {
        const Result<Libcrypto> found = open_libcrypto(file);
        CHECK(!found.ok());
        CHECK(found.fault().code() == Code::unavailable);
        CHECK(found.fault().message().find(file) != std::string::npos);
    }
}

namespace {

using Bytes = std::vector<std::uint8_t>;

SealKey key_of(std::uint8_t first) {
    SealKey key;
    std::iota(key.begin(), key.end(), first);
    return key;
}

const Libcrypto& library() {
    static const Result<Libcrypto> found = open_libcrypto("libcrypto.so.3");
    CHECK(found.ok());
    return found.value();
}

Sealing make(Sealing::Way way, std::uint8_t key = 1) {
    Result<Sealing> made = Sealing::make(library(), key_of(key), way);
    CHECK(made.ok());
    return std::move(made.value());
}

Bytes some(std::size_t size) {
    Bytes bytes(size);
    for (std::size_t at = 0; at < size; ++at) {
        bytes[at] = static_cast<std::uint8_t>(at * 7 + at / 256);
    }
    return bytes;
}

struct Piece {
    Bytes bytes;
    SealTag tag;
};

Piece seal(Sealing& sealing, const Bytes& plain) {
    Piece piece{Bytes(plain.size()), {}};
    CHECK(sealing.begin().ok());
    CHECK(sealing.run(plain, piece.bytes.data()).ok());
    const Result<SealTag> tag = sealing.finish();
    CHECK(tag.ok());
    piece.tag = tag.value();
    return piece;
}

bool opens(Sealing& opening, const Piece& piece, const Bytes& wanted) {
    Bytes plain(piece.bytes.size());
    CHECK(opening.begin().ok());
    CHECK(opening.run(piece.bytes, plain.data()).ok());
    return opening.check(piece.tag).ok() && plain == wanted;
}

}  // namespace

// NIST's GCM vectors: 256-bit key and nonce of zeros. Our first piece has such a nonce.
TEST(the_first_piece_under_a_key_of_zeros_is_the_one_of_the_standard) {
    Result<Sealing> sealing = Sealing::make(library(), SealKey{}, Sealing::Way::seal);
    CHECK(sealing.ok());
    const Piece piece = seal(sealing.value(), Bytes(16, 0));
    const Bytes text = {0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e, 0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18};
    const SealTag tag = {0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0,
                         0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
    CHECK(piece.bytes == text);
    CHECK(piece.tag == tag);
}

TEST(what_was_sealed_opens_in_its_order) {
    Sealing sealing = make(Sealing::Way::seal), opening = make(Sealing::Way::open);
    for (const std::size_t size : {1, 15, 16, 17, 4096, 100'000}) {
        const Bytes plain = some(size);
        const Piece piece = seal(sealing, plain);
        CHECK(piece.bytes != plain);
        CHECK(opens(opening, piece, plain));
    }
}

TEST(parts_of_any_size_make_the_same_piece) {
    Sealing whole = make(Sealing::Way::seal), parted = make(Sealing::Way::seal);
    const Bytes plain = some(1000);
    const Piece wanted = seal(whole, plain);
    Bytes bytes(plain.size());
    CHECK(parted.begin().ok());
    for (std::size_t at = 0, size = 1; at < plain.size(); at += size, size = size * 2 + 1) {
        size = std::min(size, plain.size() - at);
        CHECK(parted.run(std::span(plain).subspan(at, size), bytes.data() + at).ok());
    }
    CHECK(bytes == wanted.bytes);
    CHECK(parted.finish().value() == wanted.tag);
}

TEST(the_same_bytes_are_sealed_otherwise_each_time) {
    Sealing sealing = make(Sealing::Way::seal);
    const Bytes plain = some(64);
    CHECK(seal(sealing, plain).bytes != seal(sealing, plain).bytes);
}

TEST(what_was_changed_does_not_open) {
    const Bytes plain = some(100);
    for (int change = 0; change < 3; ++change) {
        Sealing sealing = make(Sealing::Way::seal);
        Sealing opening = make(Sealing::Way::open, change == 2 ? 9 : 1);
        Piece piece = seal(sealing, plain);
        if (change == 0) {
            piece.bytes[50] ^= 1;
        } else if (change == 1) {
            piece.tag[15] ^= 0x80;
        }
        CHECK(!opens(opening, piece, plain));
    }
}

TEST(a_piece_that_was_repeated_or_left_out_does_not_open) {
    Sealing sealing = make(Sealing::Way::seal);
    const Bytes plain = some(32);
    const Piece first = seal(sealing, plain), second = seal(sealing, plain);
    Sealing repeated = make(Sealing::Way::open);
    CHECK(opens(repeated, first, plain));
    CHECK(!opens(repeated, first, plain));
    Sealing without = make(Sealing::Way::open);
    CHECK(!opens(without, second, plain));
}
