// A folder of the disk tier as its owner may find it: an identity and two segments with anything in them, opened,
// read, written to until what was there is evicted, and opened again.
#include <cstdlib>
#include <fstream>

#include "disk_fixture.hpp"
#include "disk_image.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// Bits of an input's first byte, which say what the input fuzzes.
constexpr std::uint8_t kIdentity = 1, kShort = 2, kThird = 4;
constexpr std::uint64_t kLimit = 16 << 10;

void write_file(const DeviceScene& scene, const std::string& name, std::span<const std::byte> bytes) {
    const std::string path = (scene.folder.root() / name).string();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    CHECK_EQUAL(chmod(path.c_str(), 0600), 0);
}

std::string identity_text() {
    std::array<char, 256> text{};
    std::snprintf(text.data(), text.size(), "kvoffload disk %u\nstore %016llx\nsegment_bytes %llu\n", kDiskVersion,
                  static_cast<unsigned long long>(fuzz::kImageStore),
                  static_cast<unsigned long long>(fuzz::kImageBytes));
    return text.data();
}

// Reads these records, of any length that an image may give them. What is found is what its digest says.
void read_records(const DeviceScene& scene, std::uint64_t length) {
    Records records{{}, {}, nullptr};
    records.batch = std::make_shared<DiskBatch>(DiskVerb::get, 6, soon());
    for (std::uint8_t i = 0; i < 6; ++i) {
        records.memory.emplace_back(length);
        DiskItem& item = records.batch->item(i);
        item.key = fuzz::record_key(i);
        item.address = records.memory[i].data();
        item.length = length;
    }
    scene.run(records);
    for (std::uint8_t i = 0; i < 6; ++i) {
        if (records.outcome(i) == DiskOutcome::found) {
            const auto* const bytes = reinterpret_cast<const std::uint8_t*>(records.memory[i].data());
            const std::uint64_t digest = digest_record({bytes, length}, name_of(fuzz::record_key(i)));
            CHECK_EQUAL(records.batch->item(i).digest, digest);
        }
    }
}

void use(const DeviceScene& scene) {
    for (const std::uint64_t length : {10U, 300U, 5000U, 64U}) {
        read_records(scene, length);
    }
    for (std::uint32_t number = 0; number < scene.device->segment_count(); ++number) {
        scene.device->list_segment(number);
    }
    // More than all segments hold.
    for (std::uint64_t round = 0; round < 4; ++round) {
        scene.put(range(100 + round * 8, 8), 8000, false);
    }
    const DeviceHealth health = scene.health();
    CHECK(health.live_bytes <= health.capacity_bytes);
}

}  // namespace

// Two images behind each other; each ends itself.
std::vector<fuzz::Bytes> fuzz::make_seeds() {
    std::vector<Bytes> seeds;
    for (std::uint8_t style = 0; style < 8; ++style) {
        Output output;
        output.number(style);
        if ((style & kIdentity) != 0) {
            const std::string text = identity_text();
            output.number(static_cast<std::uint8_t>(text.size()));
            output.add({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
        }
        output.add(describe_segment(style % 2 == 0)).add(describe_segment(style % 3 == 0));
        seeds.push_back(output.bytes());
    }
    seeds.push_back(Output().number<std::uint8_t>(0).add(describe_lying_segment()).add(describe_segment(true)).bytes());
    return seeds;
}

void fuzz::run(std::span<const std::uint8_t> bytes) {
    if (access("/dev/shm", W_OK) == 0) {
        setenv("TMPDIR", "/dev/shm", 0);  // where a sync costs nothing
    }
    Input input(bytes);
    const std::uint8_t style = input.byte();
    DeviceScene scene("fuzz_disk");
    scene.terms.segment_bytes = kImageBytes;
    scene.terms.capacity_bytes = 4 * kImageBytes;
    scene.terms.write_buffer_bytes = 16 << 10;
    scene.terms.read_piece_bytes = 16 << 10;
    scene.terms.record_limit_bytes = kLimit;
    scene.terms.io_engine = "threads";
    const std::string text = identity_text();
    const std::span<const std::uint8_t> own =
        (style & kIdentity) != 0 ? input.take(input.byte())
                                 : std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    write_file(scene, "identity", std::as_bytes(own));
    for (std::uint32_t number = 0; number < 2; ++number) {
        std::vector<std::byte> image = make_image(input);
        image.resize((style & kShort) != 0 && number == 1 ? kImageBytes / 2 : kImageBytes);
        write_file(scene, segment_file_name(number), image);
    }
    if ((style & kThird) != 0) {
        write_file(scene, segment_file_name(7), {});
    }
    scene.open();
    if (scene.device->health().state != DeviceState::ready) {
        CHECK(scene.device->health().reason.find('\n') == std::string::npos);
        return;
    }
    use(scene);
    scene.reopen();
    CHECK(scene.device->health().state == DeviceState::ready);
    read_records(scene, 300);
    CHECK(scene.close());
}
