//! Work on a table by several threads, each with its own partitions.

/// Keys per thread: starting a thread costs as much as a few hundred keys.
const KEYS_PER_THREAD: usize = 16_384;

/// Returns the number of threads for a batch of `num_keys`, at most `limit`.
pub(crate) fn threads_for(num_keys: usize, limit: usize) -> usize {
    (num_keys / KEYS_PER_THREAD).clamp(1, limit.max(1))
}

/// Splits `items` into contiguous shares, runs `work` on each in its own thread, and returns the results in order.
///
/// `work` gets the number of its first item. The calling thread does the first share.
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
    fn every_item_is_in_one_share() {
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
