// The process that is killed: it makes a cache or takes one over, checks it, puts it under load, and stops at the call
// that the test will cut short.
#pragma once

#include <memory>
#include <random>

#include "adoption_check.hpp"
#include "cache_operations.hpp"
#include "kill_harness.hpp"

namespace kvo::test {

// Orders for the next victim.
struct Orders {
    std::uint64_t seed = 0;
    Call call = Call::none;        // where it stops; Call::adopt: before it takes over
    std::uint32_t operations = 0;  // before that
    bool acquires_all = false;     // so that all records are checked and trusted again
    bool is_last = false;          // it gives everything up, and ends
    bool is_keeper_alive = true;
};

// State that the parent and its victims share.
struct Stage {
    CacheModel model;
    Orders orders;
    pid_t keeper = 0;
    bool is_traced = true;
    std::atomic<bool> is_serving = false;     // adopted and checked
    std::atomic<bool> is_armed = false;       // untraced: the call has come
    std::atomic<bool> is_model_whole = true;  // false: a call's result is on its way into the model
    std::array<char, 300> fault{};
};

class KillVictim final : public CallObserver {
public:
    explicit KillVictim(Stage& stage) : stage_(stage), random_(stage.orders.seed) {}

    // 0, or 3 with the fault on the stage. `adopt` gives the cache.
    template <typename MakeCore>
    int run(MakeCore make_core) {
        try {
            if (stage_.is_traced && !TracedChild::allow_tracing()) {
                throw std::runtime_error("a process that could be traced cannot any more");
            }
            stage_.is_armed = false;
            stage_.is_serving = false;
            if (stage_.orders.call == Call::adopt) {
                stop();
            }
            CacheCore& core = make_core();
            if (stage_.orders.call == Call::adopt) {
                stop();
            }
            serve(core);
            return 0;
        } catch (const std::exception& fault) {
            std::strncpy(stage_.fault.data(), fault.what(), stage_.fault.size() - 1);
            return 3;
        }
    }

    void before(Call call) override {
        if (is_due_ && (call == stage_.orders.call || stage_.orders.call == Call::none)) {
            is_due_ = false;
            has_stopped_ = true;
            calls_->sync_all();
            stop();
        }
    }
    void after(Call) override {
        if (has_stopped_ && stage_.is_traced) {
            has_stopped_ = false;
            stop();
            is_due_ = true;  // the call was too short for what was wished: another one
        }
        stage_.is_model_whole = false;
    }
    void settled() override {
        if (stage_.is_armed) {
            calls_->sync_all();  // so that the next kill finds a model that knows who was evicted
        }
        stage_.is_model_whole = true;
    }

private:
    void serve(CacheCore& core) {
        CacheCalls calls(core, stage_.model, *this);
        calls_ = &calls;
        const IndexReader reader(core.memory().files().index, plan_regions(stage_.model.world.entry_limit).file_bytes);
        AdoptionCheck check(calls, reader.view());
        CacheOperations operations(calls, stage_.keeper);
        if (stage_.model.namespaces == 0) {
            calls.open_world();
        } else {
            check_adopted(check, calls);
        }
        stage_.is_serving = true;
        if (stage_.orders.is_last) {
            check.drain();
        } else {
            work(operations, calls);
        }
    }

    void check_adopted(AdoptionCheck& check, CacheCalls& calls) {
        check.check_entries();
        if (!stage_.is_model_whole) {
            calls.core().reclaim_ended();
            return;
        }
        check.settle_model(stage_.orders.is_keeper_alive);
        check.check_entries();
        if (stage_.orders.acquires_all) {
            check.acquire_all();
            calls.check_all();
        }
    }

    void work(CacheOperations& operations, CacheCalls& calls) {
        for (std::uint32_t i = 0; i < stage_.orders.operations; ++i) {
            run_any(operations);
        }
        calls.check_all();
        is_due_ = true;
        // A call that needs what is not there just now, an open session for example, comes a little later; or any call.
        constexpr int kPatience = 400;
        for (int i = 0;; ++i) {
            stage_.orders.call = i < kPatience ? stage_.orders.call : Call::none;
            if (i % 2 == 0 && is_due_) {
                run_towards(operations);
            } else {
                run_any(operations);
            }
        }
    }

    void run_any(CacheOperations& operations) {
        std::array<std::uint8_t, 16> bytes;
        for (std::uint8_t& byte : bytes) {
            byte = static_cast<std::uint8_t>(random_());
        }
        ByteSource source(bytes);
        operations.run_one(source);
    }
    void run_towards(CacheOperations& operations) {
        std::array<std::uint8_t, 16> bytes;
        for (std::uint8_t& byte : bytes) {
            byte = static_cast<std::uint8_t>(random_());
        }
        ByteSource source(bytes);
        operations.run_towards(stage_.orders.call, source);
    }

    void stop() {
        if (stage_.is_traced) {
            raise(SIGSTOP);
        } else {
            stage_.is_armed = true;
        }
    }

    Stage& stage_;
    std::mt19937_64 random_;
    CacheCalls* calls_ = nullptr;
    bool is_due_ = false;
    bool has_stopped_ = false;
};

}  // namespace kvo::test
