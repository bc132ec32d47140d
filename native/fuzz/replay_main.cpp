// Runs a target without a fuzzer: its seeds, what once broke it, and inputs made of these.
//
//     replay_NAME                        as CI does
//     replay_NAME --for SECONDS [SEED]   as long; each input has a number from which it is made again
//     replay_NAME --run FILE...          what a fuzzer has found
//     replay_NAME --seeds FOLDER         writes what a fuzzer begins with
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>

#include "mutation.hpp"
#include "target.hpp"

#if defined(__has_feature)
#define FUZZ_HAS(feature) __has_feature(feature)  // Clang
#else
#define FUZZ_HAS(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || FUZZ_HAS(address_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define FUZZ_TELLS_DEATH 1
#endif

namespace {

using kvo::fuzz::Bytes;

constexpr std::uint64_t kUsualSeed = 1;

// Of the input that runs, in hexadecimal: a line for the folder of what once broke it.
const Bytes* running = nullptr;

void show_running() {
    if (running != nullptr) {
        std::fputs("the input:\n", stderr);
        for (const std::uint8_t byte : *running) {
            std::fprintf(stderr, "%02x", byte);
        }
        std::fputs("\n", stderr);
    }
}

bool survives(const Bytes& input) {
    running = &input;
    try {
        kvo::fuzz::run(input);
    } catch (const std::exception& fault) {
        std::printf("FAIL  %s\n", fault.what());
        show_running();
        return false;
    }
    running = nullptr;
    return true;
}

// Lines of hexadecimal digits; what begins with # is said to the reader.
std::vector<Bytes> read_found(const char* path) {
    std::vector<Bytes> found;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') {
            continue;
        }
        Bytes bytes;
        for (std::size_t at = 0; at + 1 < line.size(); at += 2) {
            bytes.push_back(static_cast<std::uint8_t>(std::stoul(line.substr(at, 2), nullptr, 16)));
        }
        found.push_back(std::move(bytes));
    }
    return found;
}

Bytes read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

int write_seeds(const std::filesystem::path& folder, const std::vector<Bytes>& seeds) {
    std::filesystem::create_directories(folder);
    for (std::size_t at = 0; at < seeds.size(); ++at) {
        std::ofstream file(folder / ("seed" + std::to_string(at)), std::ios::binary);
        file.write(reinterpret_cast<const char*>(seeds[at].data()), static_cast<std::streamsize>(seeds[at].size()));
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
#if defined(FUZZ_TELLS_DEATH)
    __sanitizer_set_death_callback(show_running);
#endif
    const std::string_view what = argc > 1 ? argv[1] : "";
    std::vector<Bytes> inputs = kvo::fuzz::make_seeds();
    const std::vector<Bytes> found = read_found(FUZZ_FOUND);
    inputs.insert(inputs.end(), found.begin(), found.end());
    if (what == "--seeds" && argc > 2) {
        return write_seeds(argv[2], inputs);
    }
    if (what == "--run") {
        for (int at = 2; at < argc; ++at) {
            if (!survives(read_file(argv[at]))) {
                return 1;
            }
        }
        return 0;
    }
    for (const Bytes& input : inputs) {
        if (!survives(input)) {
            return 1;
        }
    }
    const bool is_for_long = what == "--for" && argc > 2;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(is_for_long ? std::atol(argv[2]) : 0);
    std::mt19937_64 random(is_for_long && argc > 3 ? std::strtoull(argv[3], nullptr, 10) : kUsualSeed);
    unsigned long made = 0;
    for (; is_for_long ? std::chrono::steady_clock::now() < end : made < FUZZ_INPUTS; ++made) {
        if (!survives(kvo::fuzz::mutate(inputs, random))) {
            return 1;
        }
    }
    std::printf("ok    %zu inputs, and %lu made of them\n", inputs.size(), made);
    return 0;
}
