#include "service/byte_shares.hpp"

namespace kvo {

bool ByteShares::take(const std::string& user, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > limit_ - taken_) {
        return false;
    }
    const auto known = by_user_.find(user);
    const std::uint64_t of_user = (known == by_user_.end() ? 0 : known->second) + bytes;
    if (of_user > kParts * (limit_ - taken_ - bytes)) {
        return false;
    }
    by_user_[user] = of_user;
    taken_ += bytes;
    return true;
}

void ByteShares::give_back(const std::string& user, std::uint64_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    const auto known = by_user_.find(user);
    if (known == by_user_.end()) {
        return;
    }
    known->second -= bytes;
    taken_ -= bytes;
    if (known->second == 0) {
        by_user_.erase(known);
    }
}

std::uint64_t ByteShares::taken() const {
    const std::lock_guard lock(mutex_);
    return taken_;
}

bool ByteShare::become(std::uint64_t bytes) {
    if (bytes > bytes_) {
        if (!all_.take(user_, bytes - bytes_)) {
            return false;
        }
    } else if (bytes < bytes_) {
        all_.give_back(user_, bytes_ - bytes);
    }
    bytes_ = bytes;
    return true;
}

}  // namespace kvo
