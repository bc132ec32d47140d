// Connections that wait at a listening socket.
#pragma once

namespace kvo {

// Accepts the next connection that its other end has not closed meanwhile; close-on-exec and non-blocking. Those that
// are closed, and over which nothing has come, are let go of, up to a few hundred in one call: a process that opens and
// closes connections as fast as it can costs little. Returns -EAGAIN if there is none for now, and otherwise minus the
// error by which nothing can be accepted.
int accept_open(int listener) noexcept;

}  // namespace kvo
