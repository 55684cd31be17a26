//! Answers from the workers to the connections; all answers of a batch are sent at once.
//!
//! If a worker sent them one by one, each would wake a socket thread, which would take the worker's core before the next
//! answer is sent.

use tokio::sync::{mpsc, oneshot};

use super::job::Answer;

/// An answer and the channel of the connection that waits for it.
pub(crate) type PendingAnswer = (oneshot::Sender<Answer>, Answer);

/// The channel to the socket threads.
#[derive(Clone)]
pub(crate) struct Answers(mpsc::UnboundedSender<Vec<PendingAnswer>>);

impl Answers {
    /// Returns the channel, and the task that delivers the answers sent over it.
    pub(crate) fn new() -> (Answers, impl Future<Output = ()> + Send + use<>) {
        let (sender, mut receiver) = mpsc::unbounded_channel::<Vec<PendingAnswer>>();
        let deliver_all = async move {
            while let Some(batch) = receiver.recv().await {
                batch.into_iter().for_each(deliver);
            }
        };
        (Answers(sender), deliver_all)
    }

    /// Sends the answers of a batch; `on_socket_thread`: the caller is a thread that delivers answers itself.
    pub(crate) fn send(&self, batch: Vec<PendingAnswer>, on_socket_thread: bool) {
        if on_socket_thread || batch.len() < 2 {
            return batch.into_iter().for_each(deliver);
        }
        if let Err(mpsc::error::SendError(batch)) = self.0.send(batch) {
            // The delivering task has ended with the server.
            batch.into_iter().for_each(deliver);
        }
    }
}

fn deliver((connection, answer): PendingAnswer) {
    // The connection may be gone.
    let _ = connection.send(answer);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::Refusal;

    fn batch(count: usize) -> (Vec<PendingAnswer>, Vec<oneshot::Receiver<Answer>>) {
        let answer = |at: usize| Err(Refusal::Bad(at.to_string()));
        let pairs = (0..count).map(|at| {
            let (sender, receiver) = oneshot::channel();
            ((sender, answer(at)), receiver)
        });
        pairs.unzip()
    }

    fn received(receivers: Vec<oneshot::Receiver<Answer>>) -> Vec<String> {
        receivers.into_iter().map(|mut receiver| receiver.try_recv().unwrap().unwrap_err().to_string()).collect()
    }

    #[tokio::test]
    async fn every_answer_reaches_its_connection() {
        let (answers, deliver_all) = Answers::new();
        let (one, waits_alone) = batch(1);
        answers.send(one, false);
        assert_eq!(received(waits_alone), ["0"]);
        let (many, waiting) = batch(3);
        answers.send(many, false);
        drop(answers);
        deliver_all.await;
        assert_eq!(received(waiting), ["0", "1", "2"]);
        let (orphaned, deliver_all) = Answers::new();
        drop(deliver_all);
        let (late, waiting) = batch(2);
        orphaned.send(late, false);
        assert_eq!(received(waiting), ["0", "1"]);
    }
}
