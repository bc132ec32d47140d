// The extension's door. Python is known in this folder only.
#include <nanobind/nanobind.h>
#include <pthread.h>
#include <unistd.h>

#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace {

// Called by Python's atexit. Who is on the way back must get the GIL before the interpreter ends.
void begin_python_end() {
    constexpr useconds_t kPollUs = 100;
    kvo::python_end.thread = std::this_thread::get_id();
    kvo::python_end.has_begun.store(true);
    while (kvo::python_end.returning.load() != 0) {
        const kvo::WithoutGil unlocked;
        usleep(kPollUs);
    }
}

void watch_python_end() {
    // A forked child has none of the threads that were on their way back.
    pthread_atfork(nullptr, nullptr, [] { kvo::python_end.returning.store(0); });
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(begin_python_end));
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "kvoffload's native core. Import it through kvoffload.native.";
    // Objects that threads and other extensions still hold when an interpreter ends are no leak of ours, and not worth
    // a log line.
    nb::set_leak_warnings(false);
    watch_python_end();
    kvo::bind_hash(module);
    kvo::bind_digest(module);
    kvo::bind_codec(module);
    kvo::bind_seal(module);
    kvo::bind_disk(module);
    kvo::bind_frames(module);
    kvo::bind_express(module);
    kvo::bind_link(module);
    kvo::bind_replay(module);
    kvo::bind_cache(module);
    kvo::bind_index_reader(module);
    kvo::bind_copy(module);
    kvo::bind_cuda(module);
    kvo::bind_segment_map(module);
    kvo::bind_bench(module);
    kvo::bind_capabilities(module);
}
