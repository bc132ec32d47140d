#include "codec/codec_loops.hpp"

namespace kvo {

constexpr CodecPath kPortable = {"portable",           1,
                                 codec_loops::split,   codec_loops::join,
                                 codec_loops::measure, codec_loops::lower,
                                 codec_loops::encode,  codec_loops::decode};
const CodecPath kPortableCodec = kPortable;

}  // namespace kvo
