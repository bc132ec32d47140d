// Records made from a number, and a device that is stepped by the test, in a folder that goes with it.
#pragma once

#include <sys/stat.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "digest/digest.hpp"
#include "disk/device.hpp"
#include "faulty_io.hpp"
#include "io/io_engine.hpp"
#include "made_up_files.hpp"

namespace kvo::test {

using namespace std::chrono_literals;

inline Instant soon() { return std::chrono::steady_clock::now() + 120s; }

inline RecordKey key_of(std::uint64_t number) {
    RecordKey key;
    std::memset(key.fingerprint.data(), 0x46, key.fingerprint.size());
    for (std::size_t i = 0; i < 4; ++i) {
        const std::uint64_t word = digest_field::mix(number * 4 + i + 1);
        std::memcpy(key.block_hash.data() + 8 * i, &word, 8);
    }
    key.group = static_cast<std::uint32_t>(number % 3);
    return key;
}

// Records from this number on consist of numbers in bfloat16 that are alike, so that they become shorter when they are
// coded. Those below are random.
inline constexpr std::uint64_t kAlike = std::uint64_t{1} << 32;

inline std::vector<std::byte> bytes_of(std::uint64_t number, std::size_t length) {
    std::vector<std::byte> bytes(length);
    if (number >= kAlike) {
        for (std::size_t at = 0; at + 2 <= length; at += 2) {
            const std::uint64_t random = digest_field::mix(number * 0x9e3779b97f4a7c15 + at);
            const auto exponent = static_cast<unsigned>(116 + at / 2 % 8 + std::popcount(random >> 60));
            const auto word = static_cast<std::uint16_t>((random & 0x807f) | exponent << 7);
            std::memcpy(bytes.data() + at, &word, 2);
        }
        return bytes;
    }
    for (std::size_t at = 0; at < length; at += 8) {
        const std::uint64_t word = digest_field::mix(number * 0x9e3779b97f4a7c15 + at);
        std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, length - at));
    }
    return bytes;
}

inline std::uint64_t digest_of(std::uint64_t number, std::size_t length) {
    const std::vector<std::byte> bytes = bytes_of(number, length);
    return digest_record({reinterpret_cast<const std::uint8_t*>(bytes.data()), length}, name_of(key_of(number)));
}

// A batch and the memory of its records.
struct Records {
    std::vector<std::uint64_t> numbers;
    std::vector<std::vector<std::byte>> memory;
    BatchPointer batch;

    DiskOutcome outcome(std::size_t i = 0) const { return batch->item(i).outcome; }
    bool are_all(DiskOutcome wanted) const {
        bool are = true;
        for (std::size_t i = 0; i < batch->size(); ++i) {
            are = are && batch->item(i).outcome == wanted;
        }
        return are;
    }
    // Every record that was found is what was put.
    std::size_t check_found() const {
        std::size_t found = 0;
        for (std::size_t i = 0; i < batch->size(); ++i) {
            if (batch->item(i).outcome == DiskOutcome::found) {
                ++found;
                CHECK(memory[i] == bytes_of(numbers[i], memory[i].size()));
            }
        }
        return found;
    }
};

inline Records make_records(DiskVerb verb, std::vector<std::uint64_t> numbers, std::size_t length,
                            bool wants_durable = false, Instant deadline = soon()) {
    Records records{std::move(numbers), {}, nullptr};
    records.batch = std::make_shared<DiskBatch>(verb, records.numbers.size(), deadline);
    records.batch->wants_durable = wants_durable;
    for (std::size_t i = 0; i < records.numbers.size(); ++i) {
        const std::uint64_t number = records.numbers[i];
        records.memory.push_back(verb == DiskVerb::put ? bytes_of(number, length) : std::vector<std::byte>(length));
        DiskItem& item = records.batch->item(i);
        item.key = key_of(number);
        item.parent.fill(static_cast<std::uint8_t>(number));
        item.address = records.memory.back().data();
        item.length = length;
        item.digest = verb == DiskVerb::put ? digest_of(number, length) : 0;
    }
    return records;
}

inline std::vector<std::uint64_t> range(std::uint64_t first, std::uint64_t count) {
    std::vector<std::uint64_t> numbers(count);
    for (std::uint64_t i = 0; i < count; ++i) {
        numbers[i] = first + i;
    }
    return numbers;
}

inline constexpr std::uint64_t kSmallSegment = std::uint64_t{1} << 20;

inline DeviceTerms small_terms(const std::string& path) {
    DeviceTerms terms;
    terms.path = path;
    terms.segment_bytes = kSmallSegment;
    terms.capacity_bytes = 8 * kSmallSegment;
    terms.write_buffer_bytes = 64 << 10;
    terms.read_piece_bytes = 64 << 10;
    terms.gap_bytes = 8 << 10;
    terms.record_limit_bytes = 512 << 10;
    terms.read_buffers = 8;
    terms.io_depth = 16;
    terms.write_depth = 4;
    terms.linger = 0ms;
    terms.probe_interval = 0ms;
    return terms;
}

inline std::unique_ptr<Device> make_device(const DeviceTerms& terms) {
    Result<std::unique_ptr<Device>> device = Device::create(terms);
    CHECK(device.ok());
    return std::move(device.value());
}

// A folder, a device in it, and faults.
struct DeviceScene {
    explicit DeviceScene(const std::string& name) : folder(name) {
        CHECK_EQUAL(chmod(folder.root().c_str(), 0700), 0);
        terms = small_terms(folder.root().string());
        terms.make_engine = [this]() -> Result<std::unique_ptr<IoEngine>> {
            Result<MadeEngine> made = make_io_engine(terms.io_engine, terms.io_depth);
            if (!made.ok()) {
                return made.fault();
            }
            return std::unique_ptr<IoEngine>(std::make_unique<FaultyIo>(std::move(made.value().engine), plan));
        };
    }
    void open() {
        device = make_device(terms);
        step_until([&] { return device->health().state != DeviceState::opening; });
    }
    // The faults that were planned do not outlive it.
    bool close() {
        const bool is_over = device->close(60000);
        device.reset();
        return is_over;
    }
    // Drops the device as kill -9 would: writes that are waiting are lost.
    void drop() { device.reset(); }
    void reopen() {
        CHECK(close());
        open();
    }
    template <typename Condition>
    void step_until(Condition condition) const {
        const Instant end = soon();
        for (device->step(); !condition(); device->step()) {
            CHECK(std::chrono::steady_clock::now() < end);
            wait_readable(device->file(), 1);
        }
    }
    void start(const Records& records) const {
        std::vector<std::uint32_t> items(records.batch->size());
        for (std::uint32_t i = 0; i < items.size(); ++i) {
            items[i] = i;
        }
        device->add({records.batch, items});
    }
    void run(const Records& records) const {
        start(records);
        step_until([&] { return records.batch->has_ended(); });
    }
    Records put(std::vector<std::uint64_t> numbers, std::size_t length, bool wants_durable = true) const {
        Records records = make_records(DiskVerb::put, std::move(numbers), length, wants_durable);
        run(records);
        return records;
    }
    Records get(std::vector<std::uint64_t> numbers, std::size_t length) const {
        Records records = make_records(DiskVerb::get, std::move(numbers), length);
        run(records);
        return records;
    }
    Records remove(std::vector<std::uint64_t> numbers) const {
        Records records = make_records(DiskVerb::remove, std::move(numbers), 0);
        run(records);
        return records;
    }
    DeviceHealth health() const {
        device->step();
        return device->health();
    }
    std::string segment_path(std::uint32_t number) const {
        return (folder.root() / segment_file_name(number)).string();
    }

    MadeUpFiles folder;
    std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
    DeviceTerms terms;
    std::unique_ptr<Device> device;
};

inline void fail_kind(FaultPlan& plan, IoKind kind, int error) {
    plan.set([kind, error](const IoRequest& request) {
        return request.kind == kind ? IoFault{IoFault::Kind::error, error, 0} : IoFault{};
    });
}

}  // namespace kvo::test
