//! Wakes a task at an exact time. tokio's timers have a resolution of a millisecond, which would add to each latency.

use std::io;
use std::time::Duration;

#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
pub(super) use portable::Timer;
#[cfg(all(target_os = "linux", not(feature = "portable")))]
pub(super) use timerfd::Timer;

#[cfg(all(target_os = "linux", not(feature = "portable")))]
mod timerfd {
    use std::os::fd::OwnedFd;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
    };
    use tokio::io::unix::AsyncFd;

    use super::{Duration, io};

    /// A timer of the kernel.
    pub(in super::super) struct Timer(AsyncFd<OwnedFd>);

    impl Timer {
        /// Registers the timer with the current runtime.
        pub(in super::super) fn new() -> io::Result<Self> {
            let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
            // SAFETY: the descriptor is open, and owned by the registered object, which always returns the same one.
            let timer = unsafe { AsyncFd::register(timer) };
            Ok(Timer(timer.map_err(|error| error.into_parts().1)?))
        }

        pub(in super::super) async fn sleep(&mut self, length: Duration) -> io::Result<()> {
            // Zero would disarm the timer.
            let length = length.max(Duration::from_nanos(1));
            let at = Timespec { tv_sec: length.as_secs() as i64, tv_nsec: length.subsec_nanos().into() };
            let once = Itimerspec { it_interval: Timespec::default(), it_value: at };
            timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
            loop {
                let mut ready = self.0.readable().await?;
                let read = |timer: &AsyncFd<OwnedFd>| Ok(rustix::io::read(timer.get_ref(), &mut [0; 8])?);
                if let Ok(read) = ready.try_io(read) {
                    return read.map(drop);
                }
            }
        }
    }
}

#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
mod portable {
    use super::{Duration, io};

    /// A timer of tokio.
    pub(in super::super) struct Timer;

    impl Timer {
        pub(in super::super) fn new() -> io::Result<Self> {
            Ok(Timer)
        }

        pub(in super::super) async fn sleep(&mut self, length: Duration) -> io::Result<()> {
            tokio::time::sleep(length).await;
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_timer_can_be_reused_and_never_fires_early() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut timer = Timer::new().unwrap();
            for length in [0, 1, 300, 2_000].map(Duration::from_micros) {
                let start = Instant::now();
                timer.sleep(length).await.unwrap();
                assert!(start.elapsed() >= length);
            }
        });
    }
}
