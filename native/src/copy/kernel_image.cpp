#include "copy/kernel_image.hpp"

// cmake/kernels.cmake defines both or neither: the architectures, from the list that drives nvcc ("sm_80,sm_90,..."),
// and the fat binary's path in the build folder.
#if defined(KVO_KERNEL_ARCHS)

// The assembler takes the file in as read-only data, in the section where cuobjdump looks for device code.
__asm__(
    ".pushsection .nv_fatbin, \"a\"\n"
    ".balign 64\n"
    ".hidden kvo_kernel_image_begin\n"
    ".global kvo_kernel_image_begin\n"
    "kvo_kernel_image_begin:\n"
    ".incbin \"" KVO_KERNEL_FILE
    "\"\n"
    ".hidden kvo_kernel_image_end\n"
    ".global kvo_kernel_image_end\n"
    "kvo_kernel_image_end:\n"
    ".popsection\n");

extern "C" {
extern const std::byte kvo_kernel_image_begin[];
extern const std::byte kvo_kernel_image_end[];
}

#endif

namespace kvo {

std::span<const std::byte> kernel_image() noexcept {
#if defined(KVO_KERNEL_ARCHS)
    return {kvo_kernel_image_begin, kvo_kernel_image_end};
#else
    return {};
#endif
}

std::vector<std::string_view> kernel_archs() {
    std::vector<std::string_view> archs;
#if defined(KVO_KERNEL_ARCHS)
    std::string_view rest = KVO_KERNEL_ARCHS;
    while (!rest.empty()) {
        const std::size_t comma = rest.find(',');
        archs.push_back(rest.substr(0, comma));
        rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    }
#endif
    return archs;
}

}  // namespace kvo
