//! Whole-table work on several threads, each with partitions of its own.

/// Keys that are worth a thread: starting one costs what a few hundred of them do.
const KEYS_A_THREAD: usize = 16_384;

/// Threads for a batch of `num_keys`, of the `limit` that may be used.
pub(crate) fn threads_for(num_keys: usize, limit: usize) -> usize {
    (num_keys / KEYS_A_THREAD).clamp(1, limit.max(1))
}

/// Gives each thread a share of neighbours; returns what they return, in the order of the shares.
///
/// `work` is told the number of its first item. The first share is worked on by this thread.
pub(crate) fn share<T: Send, R: Send>(
    items: &mut [T],
    num_threads: usize,
    work: impl Fn(usize, &mut [T]) -> R + Sync,
) -> Vec<R> {
    let length = items.len().div_ceil(num_threads.max(1)).max(1);
    let work = &work;
    std::thread::scope(|scope| {
        let mut shares = items.chunks_mut(length).enumerate();
        let first = shares.next();
        let others: Vec<_> = shares.map(|(number, share)| scope.spawn(move || work(number * length, share))).collect();
        let first = first.map(|(_, share)| work(0, share));
        let others = others.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume(panic)));
        first.into_iter().chain(others).collect()
    })
}

fn resume<R>(panic: Box<dyn std::any::Any + Send>) -> R {
    std::panic::resume_unwind(panic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_has_one_thread_and_its_number() {
        for num_items in [0usize, 1, 2, 7, 64] {
            for num_threads in [0, 1, 2, 3, 64, 100] {
                let mut items = vec![0; num_items];
                let shares = share(&mut items, num_threads, |first, share| {
                    share.iter_mut().enumerate().for_each(|(at, item)| *item += first + at + 1);
                    (first, share.len())
                });
                assert_eq!(items, (1..=num_items).collect::<Vec<_>>());
                assert!(shares.len() <= num_threads.max(1));
                assert!(shares.iter().map(|(first, _)| first).is_sorted());
            }
        }
    }

    #[test]
    fn small_batches_stay_on_one_thread() {
        assert_eq!(threads_for(10_000, 8), 1);
        assert_eq!(threads_for(40_000, 8), 2);
        assert_eq!(threads_for(1 << 20, 8), 8);
        assert_eq!(threads_for(1 << 20, 0), 1);
    }
}
