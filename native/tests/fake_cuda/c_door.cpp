// A door for tests in Python, which open the library by its path and call this by ctypes; no C++ on their side.
//
// fake_cuda_reset first, and fake_cuda_report_count() == 0 last. Addresses and handles are numbers. None needs a
// context or counts as a call. Whatever is wrong becomes a report, so that a test can say what it was.
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "fake_cuda/driver.hpp"

#define FAKE_DOOR extern "C" __attribute__((visibility("default")))

using kvo::fake::Driver;

// The same interface for callers in C++.
FAKE_DOOR kvo::fake::Control* fake_cuda_control();

FAKE_DOOR void fake_cuda_reset(std::uint64_t seed) {
    kvo::fake::Settings settings;
    settings.seed = seed;
    fake_cuda_control()->reset(settings);
    fake_cuda_control()->keep_reports(true);
}

// An address of the device; 0: there is not so much memory.
FAKE_DOOR std::uint64_t fake_cuda_alloc(std::uint64_t length) {
    Driver& driver = Driver::instance();
    const std::lock_guard lock(driver.streams().mutex);
    const std::uint64_t left = driver.settings().device_bytes - driver.check().memory().device_bytes();
    if (length == 0 || length > left) {
        return 0;
    }
    return driver.check().allocate(kvo::fake::MemoryKind::device, length).address;
}

FAKE_DOOR std::uint64_t fake_cuda_open_stream() {
    Driver& driver = Driver::instance();
    const std::lock_guard lock(driver.streams().mutex);
    return reinterpret_cast<std::uint64_t>(driver.open_stream(0));
}

// At once and unchecked, as the driver would see the bytes now.
FAKE_DOOR void fake_cuda_peek(std::uint64_t address, std::uint8_t* bytes, std::size_t length) {
    fake_cuda_control()->peek(address, {bytes, length});
}
FAKE_DOOR void fake_cuda_poke(std::uint64_t address, const std::uint8_t* bytes, std::size_t length) {
    fake_cuda_control()->poke(address, {bytes, length});
}

// As a model's kernel in `stream` does it, at some time: byte i becomes pattern_byte(pattern, i).
FAKE_DOOR void fake_cuda_write_pages(std::uint64_t stream, std::uint64_t address, std::uint64_t length,
                                     std::uint64_t pattern) {
    const kvo::fake::Bytes written{address, length};
    fake_cuda_control()->launch_compute(reinterpret_cast<void*>(stream), {}, {&written, 1}, pattern);
}

FAKE_DOOR std::uint8_t fake_cuda_pattern_byte(std::uint64_t pattern, std::uint64_t offset) {
    return kvo::fake::pattern_byte(pattern, offset);
}

// Of host memory, in calls to cuMemHostRegister.
FAKE_DOOR std::uint64_t fake_cuda_registrations() { return fake_cuda_control()->live().registrations; }

FAKE_DOOR std::uint64_t fake_cuda_report_count() {
    Driver& driver = Driver::instance();
    const std::lock_guard lock(driver.streams().mutex);
    return driver.check().reports().size();
}

// Valid until the next call of this or of fake_cuda_reset. Empty: there is no such report.
FAKE_DOOR const char* fake_cuda_report(std::uint64_t number) {
    static std::string text;
    Driver& driver = Driver::instance();
    const std::lock_guard lock(driver.streams().mutex);
    const std::vector<std::string>& reports = driver.check().reports();
    text = number < reports.size() ? reports[number] : "";
    return text.c_str();
}
