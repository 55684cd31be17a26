//! Answers from the scorers to the connections that wait for them: those of a batch at once.
//!
//! Each answer that a scorer gives by itself wakes a thread of the sockets, which takes its core before the next one is given.

use tokio::sync::{mpsc, oneshot};

use crate::deployment::Answer;

/// An answer and who waits for it.
pub(crate) type Settled = (oneshot::Sender<Answer>, Answer);

/// The way to the threads of the sockets.
#[derive(Clone)]
pub(crate) struct Answers(mpsc::UnboundedSender<Vec<Settled>>);

impl Answers {
    /// The way, and what has to run at its end.
    pub(crate) fn new() -> (Answers, impl Future<Output = ()> + Send + use<>) {
        let (sender, mut receiver) = mpsc::unbounded_channel::<Vec<Settled>>();
        let hand_out = async move {
            while let Some(batch) = receiver.recv().await {
                batch.into_iter().for_each(settle);
            }
        };
        (Answers(sender), hand_out)
    }

    /// Gives the answers of a batch; on a thread of the sockets (`is_here`) nobody else is woken.
    pub(crate) fn give(&self, batch: Vec<Settled>, is_here: bool) {
        if is_here || batch.len() < 2 {
            return batch.into_iter().for_each(settle);
        }
        if let Err(mpsc::error::SendError(whole)) = self.0.send(batch) {
            // nobody hands out any more: the server ends
            whole.into_iter().for_each(settle);
        }
    }
}

fn settle((waiting, answer): Settled) {
    // one that is gone needs none
    let _ = waiting.send(answer);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::Refusal;

    fn batch(count: usize) -> (Vec<Settled>, Vec<oneshot::Receiver<Answer>>) {
        let answer = |at: usize| Err(Refusal::Bad(at.to_string()));
        let pairs = (0..count).map(|at| {
            let (sender, receiver) = oneshot::channel();
            ((sender, answer(at)), receiver)
        });
        pairs.unzip()
    }

    fn told(receivers: Vec<oneshot::Receiver<Answer>>) -> Vec<String> {
        receivers.into_iter().map(|mut receiver| receiver.try_recv().unwrap().unwrap_err().to_string()).collect()
    }

    #[tokio::test]
    async fn every_answer_reaches_who_waits_for_it() {
        let (answers, hand_out) = Answers::new();
        let (one, waits_alone) = batch(1);
        answers.give(one, false);
        assert_eq!(told(waits_alone), ["0"]);
        let (many, waiting) = batch(3);
        answers.give(many, false);
        drop(answers);
        hand_out.await;
        assert_eq!(told(waiting), ["0", "1", "2"]);
        let (orphaned, nobody) = Answers::new();
        drop(nobody);
        let (late, waiting) = batch(2);
        orphaned.give(late, false);
        assert_eq!(told(waiting), ["0", "1"]);
    }
}
