#include "disk/disk_store.hpp"

#include <set>
#include <thread>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

struct StoreScene {
    explicit StoreScene(const std::string& name, std::size_t device_count = 1) {
        for (std::size_t i = 0; i < device_count; ++i) {
            folders.push_back(std::make_unique<MadeUpFiles>(name + "_" + std::to_string(i)));
            CHECK_EQUAL(chmod(folders.back()->root().c_str(), 0700), 0);
            terms.devices.push_back(small_terms(folders.back()->root().string()));
            terms.devices.back().probe_interval = 5ms;
            plans.push_back(std::make_shared<FaultPlan>());
            terms.devices.back().make_engine = [plan = plans.back()]() -> Result<std::unique_ptr<IoEngine>> {
                Result<MadeEngine> made = make_io_engine("auto", 16);
                return std::unique_ptr<IoEngine>(std::make_unique<FaultyIo>(std::move(made.value().engine), plan));
            };
        }
        terms.stripe_bytes = 64 << 10;
    }
    void open() {
        Result<std::unique_ptr<DiskStore>> made = DiskStore::create(terms);
        CHECK(made.ok());
        store = std::move(made.value());
        CHECK(store->wait_open(60000));
    }
    void run(const Records& records) {
        CHECK(store->submit(records.batch).ok());
        for (std::vector<BatchPointer> ended = store->poll(); ended.empty(); ended = store->poll()) {
            CHECK(wait_readable(store->file(), 60000));
        }
        CHECK(records.batch->has_ended());
    }
    Records put(std::vector<std::uint64_t> numbers, std::size_t length, bool wants_durable = true) {
        Records records = make_records(DiskVerb::put, std::move(numbers), length, wants_durable);
        run(records);
        return records;
    }
    Records get(std::vector<std::uint64_t> numbers, std::size_t length) {
        Records records = make_records(DiskVerb::get, std::move(numbers), length);
        run(records);
        return records;
    }
    template <typename Condition>
    void await(Condition condition) {
        while (!condition()) {
            std::this_thread::yield();
        }
    }

    std::vector<std::unique_ptr<MadeUpFiles>> folders;
    std::vector<std::shared_ptr<FaultPlan>> plans;
    StoreTerms terms;
    std::unique_ptr<DiskStore> store;
};

}  // namespace

TEST(batches_are_submitted_polled_and_told_once) {
    StoreScene scene("store_round");
    scene.open();
    CHECK(scene.put(range(0, 30), 5000).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.get(range(0, 30), 5000).check_found(), std::size_t{30});
    CHECK(scene.get({77}, 5000).are_all(DiskOutcome::missing));
    CHECK(scene.store->poll().empty());
    CHECK(!wait_readable(scene.store->file(), 0));
    const RecordKey keys[] = {key_of(3), key_of(77)};
    std::uint8_t found[2] = {9, 9};
    scene.store->contains(keys, found);
    CHECK(found[0] == 1 && found[1] == 0);
    CHECK(scene.store->close(60000).ok());
    CHECK(scene.store->submit(make_records(DiskVerb::get, {1}, 1).batch).fault().code() == Code::unavailable);
}

TEST(an_empty_batch_ends) {
    StoreScene scene("store_empty");
    scene.open();
    scene.run(make_records(DiskVerb::get, {}, 0));
}

TEST(a_batch_is_striped_over_devices_and_one_that_fails_loses_its_own) {
    StoreScene scene("store_stripes", 2);
    scene.open();
    CHECK(scene.put(range(0, 40), 20000).are_all(DiskOutcome::durable));
    const std::vector<DeviceHealth> health = scene.store->health();
    CHECK(health[0].records >= 16 && health[1].records >= 16);
    fail_kind(*scene.plans[0], IoKind::read, EIO);
    std::size_t found = 0;
    for (int i = 0; i < 3; ++i) {
        found = scene.get(range(0, 40), 20000).check_found();
    }
    CHECK_EQUAL(found, std::size_t{health[1].records});
    // New records go to the device that works.
    scene.await([&] { return scene.store->health()[0].state == DeviceState::absent; });
    CHECK(scene.put(range(100, 20), 20000).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.get(range(100, 20), 20000).check_found(), std::size_t{20});
    scene.plans[0]->set({});
    scene.await([&] { return scene.store->health()[0].state == DeviceState::ready; });
    CHECK_EQUAL(scene.get(range(0, 40), 20000).check_found(), std::size_t{40});
}

TEST(a_device_that_hangs_costs_the_deadline) {
    StoreScene scene("store_hang");
    scene.open();
    scene.put({1}, 5000);
    scene.plans[0]->set([](const IoRequest& request) {
        return request.kind == IoKind::read ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    Records records =
        make_records(DiskVerb::get, {1}, 5000, false, std::chrono::steady_clock::now() + std::chrono::milliseconds(30));
    scene.run(records);
    CHECK(records.are_all(DiskOutcome::late));
    scene.plans[0]->set({});
    scene.plans[0]->release();
    CHECK_EQUAL(scene.get({1}, 5000).check_found(), std::size_t{1});
}

TEST(batches_are_bounded) {
    StoreScene scene("store_bound");
    scene.terms.batch_limit = 2;
    scene.open();
    CHECK(scene.store->submit(make_records(DiskVerb::get, {1}, 1).batch).ok());
    CHECK(scene.store->submit(make_records(DiskVerb::get, {1}, 1).batch).ok());
    const Result<std::uint64_t> refused = scene.store->submit(make_records(DiskVerb::get, {1}, 1).batch);
    CHECK(refused.fault().message().find("all 2 batches") != std::string::npos);
    CHECK_EQUAL(scene.store->poll().size(), std::size_t{2});
    CHECK(scene.store->submit(make_records(DiskVerb::get, {1}, 1).batch).ok());
}

TEST(a_scan_lists_what_is_live) {
    StoreScene scene("store_scan", 2);
    scene.open();
    scene.put(range(0, 100), 20000);
    scene.run(make_records(DiskVerb::remove, {5, 6}, 0));
    std::vector<ListedRecord> records;
    for (std::uint64_t cursor = 0;;) {
        const Result<std::uint64_t> next = scene.store->scan(cursor, records, 60000);
        CHECK(next.ok());
        cursor = next.value();
        if (cursor == 0) {
            break;
        }
    }
    std::set<std::uint64_t> digests;
    for (const ListedRecord& record : records) {
        CHECK_EQUAL(record.length, std::uint64_t{20000});
        digests.insert(record.digest);
    }
    CHECK_EQUAL(records.size(), std::size_t{98});
    CHECK(digests.contains(digest_of(4, 20000)) && !digests.contains(digest_of(5, 20000)));
}

TEST(a_folder_that_is_not_there_is_no_fault_of_the_store) {
    StoreScene scene("store_absent");
    const std::string path = scene.terms.devices[0].path;
    std::filesystem::remove_all(path);
    scene.open();
    CHECK(scene.store->health()[0].state == DeviceState::absent);
    CHECK(scene.put({1}, 100).are_all(DiskOutcome::unavailable));
    CHECK(scene.get({1}, 100).are_all(DiskOutcome::missing));
    std::filesystem::create_directory(path);
    CHECK_EQUAL(chmod(path.c_str(), 0700), 0);
    scene.await([&] { return scene.store->health()[0].state == DeviceState::ready; });
    CHECK(scene.put({1}, 100).are_all(DiskOutcome::durable));
}

TEST(terms_without_a_device_are_refused) {
    CHECK(DiskStore::create({}).fault().code() == Code::invalid);
    StoreTerms terms;
    terms.devices.push_back(small_terms(""));
    CHECK(DiskStore::create(terms).fault().code() == Code::invalid);
}
