//! Answers of the plain API: predictions by label, in JSON.

use serde_json::json;

/// The parts that all answers of a version have in common.
#[derive(Debug)]
pub(super) struct Template {
    /// The answer up to the first prediction.
    head: Vec<u8>,
    /// The text before the score of each label: `{"click":`, `,"buy":`.
    labels: Vec<Vec<u8>>,
}

/// Estimated bytes of a score with its punctuation.
const SCORE_BYTES: usize = 16;

impl Template {
    pub(super) fn new(model: &str, variant: &str, version: u64, labels: &[String]) -> Template {
        let variant = if variant.is_empty() { String::new() } else { format!(",\"variant\":{}", json!(variant)) };
        let head = format!("{{\"model\":{},\"version\":{version}{variant},\"predictions\":[", json!(model));
        let label = |(index, label)| format!("{}{}:", if index == 0 { '{' } else { ',' }, json!(label)).into_bytes();
        Template { head: head.into_bytes(), labels: labels.iter().enumerate().map(label).collect() }
    }

    /// Writes `{"model":"demo","version":3,"predictions":[{"click":0.0123}, …]}`, with the digits that restore each
    /// f32.
    pub(super) fn write(&self, scores: &[f32]) -> serde_json::Result<Vec<u8>> {
        let names_bytes: usize = self.labels.iter().map(|label| label.len() + SCORE_BYTES).sum();
        let num_samples = scores.len() / self.labels.len();
        let mut out = Vec::with_capacity(self.head.len() + num_samples * names_bytes + 2);
        out.extend_from_slice(&self.head);
        for (sample, scores) in scores.chunks_exact(self.labels.len()).enumerate() {
            if sample > 0 {
                out.push(b',');
            }
            for (label, score) in self.labels.iter().zip(scores) {
                out.extend_from_slice(label);
                serde_json::to_writer(&mut out, score)?;
            }
            out.push(b'}');
        }
        out.extend_from_slice(b"]}");
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn scores_are_restored_bit_for_bit(scores in prop::collection::vec(0f32..=1.0, 0..5)) {
            let template = Template::new("demo", "b", 3, &["click".into(), "buy".into()]);
            let scores: Vec<f32> = scores.into_iter().flat_map(|score| [score, 1e-30 * score]).collect();
            let answer = template.write(&scores).unwrap();
            let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
            prop_assert_eq!((&answer["version"], &answer["variant"]), (&json!(3), &json!("b")));
            let predictions = answer["predictions"].as_array().unwrap();
            prop_assert_eq!(predictions.len(), scores.len() / 2);
            for (prediction, scores) in predictions.iter().zip(scores.chunks(2)) {
                let back = ["click", "buy"].map(|label| prediction[label].as_f64().unwrap() as f32);
                prop_assert_eq!(back, [scores[0], scores[1]]);
            }
        }
    }
}
