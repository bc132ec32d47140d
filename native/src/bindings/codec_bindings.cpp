#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <mutex>
#include <optional>
#include <string>

#include "bindings/bindings.hpp"
#include "codec/background_codec.hpp"
#include "codec/codec_paths.hpp"
#include "codec/record_codec.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

// Threads that share it take turns. In a forked child one may have the turn for ever, and have left it half-way.
template <typename Codes>
class Encoder {
public:
    std::optional<nb::bytes> encode(nb::handle record) {
        if (getpid() != process_) {
            throw nb::value_error("the encoder belongs to the process that made it, and this is a child of it");
        }
        const BufferView buffer(record);
        std::unique_lock turn(turn_, std::defer_lock);
        std::span<const std::uint8_t> coded;
        {
            const WithoutGil unlocked;
            turn.lock();
            coded = encoder_.encode(buffer.bytes());
        }
        if (coded.empty()) {
            return std::nullopt;
        }
        return nb::bytes(coded.data(), coded.size());
    }

private:
    const pid_t process_ = getpid();
    std::mutex turn_;
    Codes encoder_;
};

bool decode(nb::handle coded, nb::handle record) {
    const BufferView source(coded);
    const WritableBufferView target(record);
    const WithoutGil unlocked;
    return decode_record(source.bytes(), target.bytes());
}

template <typename Codes>
void bind_encoder(nb::module_& module, const char* name, const char* text) {
    nb::class_<Encoder<Codes>>(module, name, text)
        .def(nb::init<>())
        .def("encode", &Encoder<Codes>::encode, nb::arg("record"),
             "The coded record. None: it would not be shorter by 5%. The GIL is released: nobody may change the bytes "
             "meanwhile.");
}

}  // namespace

void bind_codec(nb::module_& module) {
    bind_encoder<RecordEncoder>(module, "RecordEncoder", "Codes records without loss (docs/format.md).");
    bind_encoder<BackgroundCodec>(module, "BackgroundEncoder",
                                  "Codes records without loss, in a thread of its own that has a low priority.");
    module.def("decode_record", decode, nb::arg("coded"), nb::arg("record"),
               "Whether these bytes are a coded record of the length of `record`, which has what it says then. "
               "Otherwise what `record` has is worth nothing. The GIL is released, as for encode.");
    module.def(
        "codec_path", [] { return std::string(name_of(codec_paths().front())); },
        "The instructions that records are coded with.");
}

}  // namespace kvo
