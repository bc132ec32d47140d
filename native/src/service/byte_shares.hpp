// Memory that is for all of them, and how much of it one user may have.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace kvo {

// Safe to call from any thread.
class ByteShares {
public:
    explicit ByteShares(std::uint64_t limit) : limit_(limit) {}

    // False, and nothing is taken, where that is more than three times what would be left for others: one user alone
    // gets three quarters of the limit.
    bool take(const std::string& user, std::uint64_t bytes);
    void give_back(const std::string& user, std::uint64_t bytes) noexcept;
    std::uint64_t taken() const;

private:
    static constexpr std::uint64_t kParts = 3;

    const std::uint64_t limit_;
    mutable std::mutex mutex_;  // guards what follows
    std::uint64_t taken_ = 0;
    std::map<std::string, std::uint64_t> by_user_;
};

// The bytes that one channel of a user has taken of the shares. Belongs to one thread.
class ByteShare {
public:
    ByteShare(ByteShares& all, std::string user) : all_(all), user_(std::move(user)) {}
    ~ByteShare() { all_.give_back(user_, bytes_); }
    ByteShare(const ByteShare&) = delete;
    ByteShare& operator=(const ByteShare&) = delete;

    // Takes or gives back bytes so that it has this many. False: it has as many as before.
    bool become(std::uint64_t bytes);

private:
    ByteShares& all_;
    const std::string user_;
    std::uint64_t bytes_ = 0;
};

}  // namespace kvo
