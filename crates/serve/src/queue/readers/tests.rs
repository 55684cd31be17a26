//! Reader processes simulated by the tests: working, dead, silent, and with invalid answers.

use std::io::{Read as _, Write as _};
use std::thread::JoinHandle;

use elasticrec_sample::{Batch, BatchBuilder};

use super::*;
use crate::codecs::parsed::encode;

/// Long enough for a slow machine; only a failing test waits this long.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(100);
const LIMITS: ReaderLimits =
    ReaderLimits { shape: Shape { num_slots: 1, num_dense: 0 }, limits: Limits { max_instances: 4 }, queue: 2 };

/// Adds a process that answers each request with `answer`, and ends when that returns None.
fn process(
    readers: &Readers,
    mut answer: impl FnMut(&str) -> Option<Vec<u8>> + Send + 'static,
) -> (u64, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let id = readers.add(ours).unwrap();
    let thread = std::thread::spawn(move || {
        let mut length = [0; 4];
        while theirs.read_exact(&mut length).is_ok() {
            let mut text = vec![0; u32::from_le_bytes(length) as usize];
            theirs.read_exact(&mut text).unwrap();
            let Some(answer) = answer(&String::from_utf8(text).unwrap()) else { return };
            let _ = theirs.write_all(&answer);
        }
    });
    (id, thread)
}

fn frame(status: u8, body: &[u8]) -> Vec<u8> {
    [&[status][..], &(body.len() as u32).to_le_bytes(), body].concat()
}

/// Returns a batch with a sample for each line; its sign is the number on the line.
fn batch_of_lines(text: &str) -> Batch {
    let mut builder = BatchBuilder::new(1, 0, 1, 0);
    for line in text.lines() {
        builder.begin();
        builder.add_sign(0, line.parse().unwrap());
        builder.end(1, 0);
    }
    builder.finish()
}

fn correct_answer(text: &str) -> Option<Vec<u8>> {
    Some(frame(BATCH, &encode(&batch_of_lines(text))))
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
    runtime.block_on(future)
}

async fn read(readers: &Arc<Readers>, text: &str) -> Result<Bytes, Refusal> {
    readers.read(&Bytes::from(text.to_owned()), LIMITS, None).await.map(|read| read.body)
}

#[test]
fn lines_become_a_batch_and_a_refusal_names_its_line() {
    let readers = Arc::new(Readers::new(LONG));
    process(&readers, |text| {
        if text == "x\n" { Some(frame(REFUSED, b"line 1: no\nnumber \xff")) } else { correct_answer(text) }
    });
    run(async {
        assert_eq!(read(&readers, "7\n8\n").await.unwrap(), encode(&batch_of_lines("7\n8\n")));
        let refused = Refusal::Bad("line 1: no number \u{fffd}".into());
        assert_eq!(read(&readers, "x\n").await.unwrap_err(), refused);
        assert_eq!(read(&readers, "").await.unwrap(), encode(&batch_of_lines("")));
        let many = Refusal::TooLarge("expected at most 4 lines in a request, got more".into());
        assert_eq!(read(&readers, "1\n2\n3\n4\n5").await.unwrap_err(), many);
    });
    assert_eq!((readers.num_alive(), readers.lost()), (1, vec![]));
}

#[test]
fn an_invalid_answer_ends_its_process_and_is_not_returned() {
    let one = encode(&batch_of_lines("1"));
    let wrong: [(Vec<u8>, &str); 6] = [
        (vec![9, 0, 0, 0, 0], "status: expected 0 or 1, got 9"),
        (vec![BATCH, 255, 255, 255, 255], "expected at most 67108864 bytes, got 4294967295"),
        (vec![REFUSED, 0, 0, 1, 1], "expected at most 65536 bytes, got 16842752"),
        (frame(BATCH, &one[..one.len() - 1]), "1 samples and 1 signs: expected 16 bytes, got 15"),
        (frame(BATCH, b""), "expected at least 8 bytes, got 0"),
        (frame(BATCH, &encode(&batch_of_lines("1\n2"))), "expected at most 1 samples, got 2"),
    ];
    for (answer, what) in wrong {
        let readers = Arc::new(Readers::new(LONG));
        let (id, thread) = process(&readers, move |_| Some(answer.clone()));
        let refusal = run(read(&readers, "1\n")).unwrap_err();
        assert_eq!(refusal, Refusal::Internal(format!("reader: invalid answer of the reader process: {what}")));
        assert_eq!((readers.num_alive(), readers.lost(), readers.lost()), (0, vec![id], vec![]));
        // The process ends, because its socket is closed.
        thread.join().unwrap();
    }
}

#[test]
fn a_request_survives_one_dead_process_but_not_two() {
    let readers = Arc::new(Readers::new(LONG));
    process(&readers, correct_answer);
    let (bad, _) = process(&readers, |_| None);
    run(async {
        assert_eq!(read(&readers, "7").await.unwrap(), encode(&batch_of_lines("7")));
        assert_eq!(readers.lost(), [bad]);
        // A process that has sent bytes unasked gets no request.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let loud = readers.add(ours).unwrap();
        theirs.write_all(&correct_answer("9").unwrap()).unwrap();
        assert_eq!(read(&readers, "8").await.unwrap(), encode(&batch_of_lines("8")));
        assert_eq!(readers.lost(), [loud]);
    });
    assert_eq!(readers.num_alive(), 1);
    let readers = Arc::new(Readers::new(LONG));
    for _ in 0..3 {
        process(&readers, |_| None);
    }
    let refusal = run(read(&readers, "7")).unwrap_err();
    let expected = "reader: two reader processes died on this request";
    assert_eq!(refusal, Refusal::Internal(expected.into()));
    assert_eq!((readers.num_alive(), readers.lost().len()), (1, 2));
}

#[test]
fn an_incomplete_answer_is_not_returned() {
    let readers = Arc::new(Readers::new(LONG));
    process(&readers, correct_answer);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let incomplete = readers.add(ours).unwrap();
    let thread = std::thread::spawn(move || {
        theirs.read_exact(&mut [0; 5]).unwrap();
        theirs.write_all(&[BATCH, 9, 0, 0, 0, 1]).unwrap();
    });
    assert_eq!(run(read(&readers, "7")).unwrap(), encode(&batch_of_lines("7")));
    assert_eq!(readers.lost(), [incomplete]);
    thread.join().unwrap();
}

#[test]
fn a_process_that_hangs_is_given_up_and_without_processes_requests_are_refused() {
    let readers = Arc::new(Readers::new(SHORT));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let id = readers.add(ours).unwrap();
    run(async {
        let refusal = read(&readers, "7").await.unwrap_err();
        let expected = "reader: no answer within 100 ms (`serve.reader_timeout_ms`); the reader process was ended";
        assert_eq!(refusal, Refusal::Internal(expected.into()));
        assert_eq!(readers.lost(), [id]);
        assert!(
            matches!(read(&readers, "7").await.unwrap_err(), Refusal::Unavailable(what) if what.starts_with("reader: "))
        );
        // A process that is added while a request waits answers it.
        let (late, _) = tokio::join!(read(&readers, "7"), async { process(&readers, correct_answer) });
        assert_eq!(late.unwrap(), encode(&batch_of_lines("7")));
    });
    drop(theirs);
}

#[test]
fn a_deadline_ends_the_wait_and_a_full_queue_refuses_at_once() {
    let readers = Arc::new(Readers::new(LONG));
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (id, _) = process(&readers, move |text| {
        wait.recv().unwrap();
        correct_answer(text)
    });
    run(async {
        let soon = || Some(Deadline::within(SHORT));
        let text = Bytes::from_static(b"1");
        // The first request is in the process, two wait, and the fourth is refused.
        let ask = || readers.read(&text, LIMITS, soon());
        let (a, b, c, d) = tokio::join!(ask(), ask(), ask(), ask());
        let late = Refusal::DeadlineExceeded { after_ms: SHORT.as_millis() };
        assert_eq!([a, b, c].map(|one| one.unwrap_err()), [late.clone(), late.clone(), late]);
        assert_eq!(d.unwrap_err(), Refusal::QueueFull { queue: 2 });
        // The late answer to the first request is not returned for the next one.
        go.send(()).unwrap();
        go.send(()).unwrap();
        assert_eq!(read(&readers, "2").await.unwrap(), encode(&batch_of_lines("2")));
    });
    assert_eq!((readers.num_alive(), readers.lost()), (1, vec![]));
    assert_eq!(id, 0);
}
