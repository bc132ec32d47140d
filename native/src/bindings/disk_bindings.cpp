#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/copy_handle.hpp"
#include "bindings/seal_handle.hpp"
#include "disk/disk_store.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

// Records of one identity, group and shard; their hashes one after the other.
struct NamesArgument {
    std::vector<RecordKey> keys;

    NamesArgument(const nb::bytes& fingerprint, nb::handle hashes, std::uint32_t group, std::uint32_t shard) {
        const BufferView view(hashes);
        if (fingerprint.size() != kFingerprintBytes || view.bytes().size() % kBlockHashBytes != 0) {
            throw nb::value_error("a fingerprint and each hash have 32 bytes");
        }
        RecordKey key;
        std::memcpy(key.fingerprint.data(), fingerprint.data(), kFingerprintBytes);
        key.group = group;
        key.shard = shard;
        keys.assign(view.bytes().size() / kBlockHashBytes, key);
        for (std::size_t i = 0; i < keys.size(); ++i) {
            std::memcpy(keys[i].block_hash.data(), view.bytes().data() + i * kBlockHashBytes, kBlockHashBytes);
        }
    }
};

// Checks that an optional list is empty or has one item for each record.
template <typename Item>
void check_count(const std::vector<Item>& items, std::size_t count, const char* name) {
    if (!items.empty() && items.size() != count) {
        throw nb::value_error((std::string(name) + " must be one for each record").c_str());
    }
}

template <typename Item, typename Value>
nb::bytes column(const std::vector<Item>& items, Value Item::* member) {
    std::vector<std::uint8_t> bytes(items.size() * sizeof(Value));
    for (std::size_t i = 0; i < items.size(); ++i) {
        std::memcpy(bytes.data() + i * sizeof(Value), &(items[i].*member), sizeof(Value));
    }
    return to_bytes(bytes);
}

const char* state_name(DeviceState state) {
    switch (state) {
        case DeviceState::opening:
            return "opening";
        case DeviceState::ready:
            return "ready";
        case DeviceState::read_only:
            return "read_only";
        case DeviceState::absent:
            break;
    }
    return "absent";
}

nb::dict to_dict(const DeviceHealth& health) {
    nb::dict all;
    all["state"] = state_name(health.state);
    all["reason"] = health.reason;
    all["io_engine"] = health.io_engine;
    all["capacity_bytes"] = health.capacity_bytes;
    all["segments"] = health.segments;
    all["records"] = health.records;
    all["live_bytes"] = health.live_bytes;
    all["index_bytes"] = health.index_bytes;
    const DeviceCounts& counts = health.counts;
    all["put_records"] = counts.put_records;
    all["put_bytes"] = counts.put_bytes;
    all["written_bytes"] = counts.written_bytes;
    all["coded_records"] = counts.coded_records;
    all["coded_bytes"] = counts.coded_bytes;
    all["coded_stored_bytes"] = counts.coded_stored_bytes;
    all["moved_bytes"] = counts.moved_bytes;
    all["found_records"] = counts.found_records;
    all["found_bytes"] = counts.found_bytes;
    all["read_bytes"] = counts.read_bytes;
    all["damaged_records"] = counts.damaged_records;
    all["unreadable_records"] = counts.unreadable_records;
    all["over_budget_records"] = counts.over_budget_records;
    all["evicted_segments"] = counts.evicted_segments;
    all["evicted_records"] = counts.evicted_records;
    all["io_errors"] = counts.io_errors;
    all["dropped_segments"] = counts.dropped_segments;
    all["recovered_records"] = counts.recovered_records;
    all["recovered_segments"] = counts.recovered_segments;
    all["scanned_segments"] = counts.scanned_segments;
    all["recovery_us"] = counts.recovery_us;
    return all;
}

// The store, and the Python objects in whose memory records lie.
class OwnedDiskStore {
public:
    OwnedDiskStore(std::unique_ptr<DiskStore> store, nb::object memory)
        : memory_(std::move(memory)), store_(std::move(store)) {}

    ~OwnedDiskStore() {
        const WithoutGil unlocked;
        store_.reset();  // once it is gone nothing touches a record's memory, whatever a device still does
    }
    OwnedDiskStore(const OwnedDiskStore&) = delete;
    OwnedDiskStore& operator=(const OwnedDiskStore&) = delete;

    // Returns the batch's number, or none if as many batches are under way as the limit allows.
    std::optional<std::uint64_t> submit(int verb, const nb::bytes& fingerprint, nb::handle hashes, std::uint32_t group,
                                        std::uint32_t shard, nb::handle slots, std::uint64_t record_bytes,
                                        nb::handle digests, nb::handle parents, bool wants_durable, int timeout_ms) {
        check_process();
        const NamesArgument names(fingerprint, hashes, group, shard);
        const auto slot = read_numbers<std::uint64_t>(slots, "slots");
        const auto digest = read_numbers<std::uint64_t>(digests, "digests");
        const auto parent = read_numbers<Name32>(parents, "parents");
        const bool has_slots = verb != static_cast<int>(DiskVerb::remove);
        if (slot.size() != (has_slots ? names.keys.size() : 0)) {
            throw nb::value_error("slots must be one for each record that is put or got");
        }
        check_count(digest, names.keys.size(), "digests");
        check_count(parent, names.keys.size(), "parents");
        const Instant deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
        auto batch = std::make_shared<DiskBatch>(static_cast<DiskVerb>(verb), names.keys.size(), deadline);
        batch->wants_durable = wants_durable;
        for (std::size_t i = 0; i < names.keys.size(); ++i) {
            DiskItem& item = batch->item(i);
            item.key = names.keys[i];
            item.length = record_bytes;
            item.address = has_slots ? reinterpret_cast<std::byte*>(slot[i]) : nullptr;
            item.digest = digest.empty() ? 0 : digest[i];
            item.parent = parent.empty() ? Name32{} : parent[i];
        }
        const Result<std::uint64_t> ticket = [&] {
            const WithoutGil unlocked;
            return store_->submit(batch);
        }();
        if (!ticket.ok() && ticket.fault().message().starts_with("all ")) {
            return std::nullopt;
        }
        raise_if_not_ok(ticket.ok() ? Status{} : ticket.fault());
        return ticket.value();
    }

    // By batch: ticket, and for each record one byte of outcome, 8 of digest and 32 of the parent's hash.
    nb::list poll() {
        check_process();
        const std::vector<BatchPointer> ended = [&] {
            const WithoutGil unlocked;
            return store_->poll();
        }();
        nb::list all;
        for (const BatchPointer& batch : ended) {
            std::vector<std::uint8_t> outcomes(batch->size());
            std::vector<std::uint64_t> digests(batch->size());
            std::vector<Name32> parents(batch->size());
            for (std::size_t i = 0; i < batch->size(); ++i) {
                const DiskItem& item = batch->item(i);
                outcomes[i] = static_cast<std::uint8_t>(item.outcome.load());
                digests[i] = item.digest;
                parents[i] = item.parent;
            }
            all.append(nb::make_tuple(batch->ticket, to_bytes(outcomes), to_bytes(digests), to_bytes(parents)));
        }
        return all;
    }

    nb::bytes contains(const nb::bytes& fingerprint, nb::handle hashes, std::uint32_t group, std::uint32_t shard) {
        check_process();
        const NamesArgument names(fingerprint, hashes, group, shard);
        std::vector<std::uint8_t> found(names.keys.size());
        {
            const WithoutGil unlocked;
            store_->contains(names.keys, found);
        }
        return to_bytes(found);
    }

    nb::tuple scan(std::uint64_t cursor, int timeout_ms) {
        check_process();
        std::vector<ListedRecord> records;
        const Result<std::uint64_t> next = [&] {
            const WithoutGil unlocked;
            return store_->scan(cursor, records, timeout_ms);
        }();
        raise_if_not_ok(next.ok() ? Status{} : next.fault());
        std::vector<RecordKey> keys;
        for (const ListedRecord& record : records) {
            keys.push_back(record.key);
        }
        return nb::make_tuple(next.value(), column(keys, &RecordKey::fingerprint), column(keys, &RecordKey::block_hash),
                              column(keys, &RecordKey::group), column(keys, &RecordKey::shard),
                              column(records, &ListedRecord::length), column(records, &ListedRecord::digest),
                              column(records, &ListedRecord::parent));
    }

    nb::list health() {
        check_process();
        nb::list all;
        for (const DeviceHealth& one : store_->health()) {
            all.append(to_dict(one));
        }
        return all;
    }

    bool wait_open(int timeout_ms) {
        check_process();
        const WithoutGil unlocked;
        return store_->wait_open(timeout_ms);
    }

    void close(int timeout_ms) {
        check_process();
        const Status status = [&] {
            const WithoutGil unlocked;
            return store_->close(timeout_ms);
        }();
        memory_.reset();
        raise_if_not_ok(status);
    }

    int file() const { return store_->file(); }

private:
    void check_process() const {
        if (getpid() != process_) {
            nb::raise("the disk tier belongs to the process that made it, and this is a child of it");
        }
    }

    nb::object memory_;
    std::unique_ptr<DiskStore> store_;
    const pid_t process_ = getpid();
};

// A device: its folder and its capacity in bytes.
using DeviceTuple = std::tuple<std::string, std::uint64_t>;

std::unique_ptr<OwnedDiskStore> create_disk_store(const std::vector<DeviceTuple>& devices, std::uint64_t segment_bytes,
                                                  std::uint64_t daily_bytes, int coding,
                                                  std::uint64_t record_limit_bytes, bool may_create,
                                                  const std::string& io_engine, int probe_ms, std::size_t batch_limit,
                                                  const SealKeysHandle* seal_keys, nb::object memory) {
    StoreTerms terms;
    terms.batch_limit = batch_limit;
    for (const auto& [path, capacity_bytes] : devices) {
        DeviceTerms& device = terms.devices.emplace_back();
        device.path = path;
        device.capacity_bytes = capacity_bytes;
        device.segment_bytes = segment_bytes;
        device.daily_bytes = daily_bytes;
        device.coding = static_cast<DiskCoding>(coding);
        device.seal_keys = seal_keys == nullptr ? nullptr : seal_keys->keys;
        device.record_limit_bytes = record_limit_bytes;
        device.may_create = may_create;
        device.io_engine = io_engine;
        device.probe_interval = std::chrono::milliseconds(probe_ms);
    }
    auto store = [&] {
        const WithoutGil unlocked;
        return DiskStore::create(std::move(terms));
    }();
    return std::make_unique<OwnedDiskStore>(take(std::move(store)), std::move(memory));
}

}  // namespace

void bind_disk(nb::module_& module) {
    nb::class_<OwnedDiskStore>(module, "DiskStore", "Records by key on disks, each with a thread of its own.")
        .def("submit", &OwnedDiskStore::submit, nb::arg("verb"), nb::arg("fingerprint"), nb::arg("hashes"),
             nb::arg("group"), nb::arg("shard"), nb::arg("slots"), nb::arg("record_bytes"), nb::arg("digests"),
             nb::arg("parents"), nb::arg("wants_durable"), nb::arg("timeout_ms"))
        .def("poll", &OwnedDiskStore::poll)
        .def("contains", &OwnedDiskStore::contains)
        .def("scan", &OwnedDiskStore::scan)
        .def("health", &OwnedDiskStore::health)
        .def("wait_open", &OwnedDiskStore::wait_open)
        .def("close", &OwnedDiskStore::close)
        .def("file", &OwnedDiskStore::file);
    module.def("create_disk_store", create_disk_store, nb::arg("devices"), nb::kw_only(), nb::arg("segment_bytes"),
               nb::arg("daily_bytes"), nb::arg("coding"), nb::arg("record_limit_bytes"), nb::arg("may_create"),
               nb::arg("io_engine"), nb::arg("probe_ms"), nb::arg("batch_limit"), nb::arg("seal_keys").none(),
               nb::arg("memory").none(),
               "Starts a thread for each device. `memory` is held until the store is closed.");
}

}  // namespace kvo
