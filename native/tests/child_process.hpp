// A child of the test that runs a function and can be talked to; killed and reaped with the test at the latest.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

namespace kvo::test {

// One end of a line between parent and child. Both calls throw if the other side is gone.
class Line {
public:
    explicit Line(int file) : file_(file) {}
    void tell(char word = '!') const {
        if (send(file_, &word, 1, MSG_NOSIGNAL) != 1) {
            throw std::runtime_error("the other process has gone");
        }
    }
    char await() const {
        char word = 0;
        if (read(file_, &word, 1) != 1) {
            throw std::runtime_error("the other process has gone");
        }
        return word;
    }

private:
    int file_;
};

class ChildProcess {
public:
    // `body(const Line&)` returns the child's exit code; one that throws ends it with 99.
    template <typename Body>
    explicit ChildProcess(Body body) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
            throw std::runtime_error("socketpair failed");
        }
        pid_ = fork();
        if (pid_ == 0) {
            close(ends[0]);
            int code = 99;
            try {
                code = body(Line(ends[1]));
            } catch (...) {
            }
            _exit(code);
        }
        close(ends[1]);
        end_ = ends[0];
        if (pid_ < 0) {
            throw std::runtime_error("fork failed");
        }
    }
    ~ChildProcess() {
        if (!is_reaped_) {
            kill(pid_, SIGKILL);
            wait_exit();
        }
        close(end_);
    }
    ChildProcess(const ChildProcess&) = delete;
    ChildProcess& operator=(const ChildProcess&) = delete;

    pid_t pid() const { return pid_; }
    Line line() const { return Line(end_); }
    void send_signal(int number) const { kill(pid_, number); }

    // Returns when the child is stopped by a signal.
    void wait_stopped() const {
        int status = 0;
        while (waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
        }
    }
    // Returns when the child has ended, without reaping it.
    void wait_zombie() const {
        siginfo_t ignored{};
        while (waitid(P_PID, static_cast<id_t>(pid_), &ignored, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
        }
    }
    // Reaps. The exit code, or minus the signal that ended it.
    int wait_exit() {
        int status = 0;
        while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
        }
        is_reaped_ = true;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

private:
    pid_t pid_ = -1;
    int end_ = -1;
    bool is_reaped_ = false;
};

}  // namespace kvo::test
