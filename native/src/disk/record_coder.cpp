#include "disk/record_coder.hpp"

#include <vector>

namespace kvo {

std::span<const std::uint8_t> RecordCoder::code(const DiskItem& item) {
    if (!choice_.wants(item.key.group, item.length)) {
        return {};
    }
    const std::span record(reinterpret_cast<const std::uint8_t*>(item.address), item.length);
    const std::span<const std::uint8_t> coded = encoder_.encode(record);
    tried_bytes_ += item.length;
    choice_.told_coded(item.key.group, item.length, coded.empty() ? item.length : coded.size());
    if (!coded.empty() && choice_.needs_trial()) {
        std::vector<std::uint8_t> scratch(record.size());
        const Instant begun = terms_.now();
        static_cast<void>(decode_record(coded, scratch));
        choice_.told_decoded(record.size(), terms_.now() - begun);
    }
    if (!coded.empty()) {
        ++counts_.coded_records;
        counts_.coded_bytes += item.length;
        counts_.coded_stored_bytes += coded.size();
    }
    return coded;
}

}  // namespace kvo
