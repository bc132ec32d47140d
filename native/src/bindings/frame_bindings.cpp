#include <map>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/frame_reader.hpp"
#include "bindings/frame_writer.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

// Frames of one direction and channel, as far as they are plain: whole, of this version, nothing wrong with them.
// None for all others, for which the codec in Python has the words.
class PlainFrames {
public:
    // `minima`: of the numbers behind the operation's.
    PlainFrames(nb::tuple minima, std::size_t limit_bytes) : limit_bytes_(limit_bytes) {
        for (nb::handle minimum : minima) {
            minima_.push_back(nb::cast<std::uint64_t>(minimum));
        }
    }

    void add(std::uint64_t op, nb::tuple plan) { shapes_.emplace(op, frames::read_shape(plan)); }

    nb::object read(nb::handle frame) const {
        const BufferView view(frame);
        try {
            frames::Reader reader(view.bytes());
            const std::size_t items = reader.array(frames::kArrayItems);
            const auto known = shapes_.find(reader.whole());
            if (view.bytes().size() > limit_bytes_ || items <= minima_.size() || known == shapes_.end()) {
                return nb::none();
            }
            auto found = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(1 + minima_.size())));
            for (std::size_t at = 0; at < minima_.size(); ++at) {
                const std::uint64_t number = reader.whole();
                if (number < minima_[at]) {
                    return nb::none();
                }
                PyTuple_SetItem(found.ptr(), static_cast<Py_ssize_t>(at + 1), PyLong_FromUnsignedLongLong(number));
            }
            nb::object message = reader.record(known->second, items - 1 - minima_.size());
            PyTuple_SetItem(found.ptr(), 0, message.release().ptr());
            return reader.at_end() ? nb::object(found) : nb::none();
        } catch (const frames::NotPlain&) {
            return nb::none();
        }
    }

    nb::object write(std::uint64_t op, nb::handle message, nb::tuple numbers) const {
        const auto known = shapes_.find(op);
        if (known == shapes_.end() || nb::len(numbers) != minima_.size()) {
            return nb::none();
        }
        try {
            frames::Writer writer;
            writer.array(1 + minima_.size() + known->second.fields.size());
            writer.whole(op);
            for (std::size_t at = 0; at < minima_.size(); ++at) {
                const std::uint64_t number = frames::Writer::to_whole(numbers[at]);
                if (number < minima_[at]) {
                    return nb::none();
                }
                writer.whole(number);
            }
            writer.record(known->second, message);
            if (writer.frame.size() > limit_bytes_) {
                return nb::none();
            }
            return nb::bytes(writer.frame.data(), writer.frame.size());
        } catch (const frames::NotPlain&) {
            return nb::none();
        }
    }

private:
    std::map<std::uint64_t, frames::Shape> shapes_;
    std::vector<std::uint64_t> minima_;
    std::size_t limit_bytes_;
};

}  // namespace

void bind_frames(nb::module_& module) {
    nb::class_<PlainFrames>(module, "PlainFrames",
                            "The codec's frames of one direction and channel, if they are plain.")
        .def(nb::init<nb::tuple, std::size_t>())
        .def("add", &PlainFrames::add)
        .def("read", &PlainFrames::read)
        .def("write", &PlainFrames::write);
}

}  // namespace kvo
