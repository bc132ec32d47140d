// A lossless code for records of a KV cache, as docs/format.md defines it: the bits that repeat are parted from those
// that do not, brought to a common height column by column, and coded with a table for each chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvo {

inline constexpr std::uint64_t kMaxCodedRecordBytes = std::uint64_t{1} << 31;

struct CodecPath;

// The implementations that this processor runs, the fastest first; all make the same bytes. The last one is portable.
std::span<const CodecPath> codec_paths() noexcept;
std::string_view name_of(const CodecPath& path) noexcept;

// For one thread at a time. Keeps the memory that it works in, about twice the largest record.
class RecordEncoder {
public:
    RecordEncoder();  // Of the fastest path.
    explicit RecordEncoder(const CodecPath& path) : path_(path) {}

    // Returns the coded record, valid until the next call, or nothing if it would not be at least 5% shorter or is
    // larger than 2 GiB. A sample of the record usually shows that it would not.
    std::span<const std::uint8_t> encode(std::span<const std::uint8_t> record);

private:
    const CodecPath& path_;
    std::vector<std::uint8_t> coded_;
    std::vector<std::uint8_t> symbols_;
    std::vector<std::uint8_t> words_;
};

// Decodes `coded` into `record`. Returns false if `coded` is not a whole coded record of exactly that many bytes; the
// contents of `record` are then meaningless. Never writes elsewhere, and takes time linear in both lengths. Only the
// record's digest tells whether the bytes are the right ones.
bool decode_record(std::span<const std::uint8_t> coded, std::span<std::uint8_t> record) noexcept;
bool decode_record(std::span<const std::uint8_t> coded, std::span<std::uint8_t> record, const CodecPath& path) noexcept;

}  // namespace kvo
