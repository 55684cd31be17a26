//! Bodies of ElasticCTR's clients, and the errors of invalid bodies.

use elasticrec_sample::{Batch, Parser};
use proptest::prelude::*;

use super::super::json::fuzz_parsers;
use super::super::{AnswerFormat, Codec, Limits};
use super::*;

fn decoded(parser: &Parser, codec: Codec, body: &str) -> Result<Batch, String> {
    let mut builder = parser.builder(1);
    let limits = Limits { max_instances: 3 };
    codec
        .decode(parser, body.as_bytes(), limits, &mut builder)
        .map(|_| builder.finish())
        .map_err(|error| error.to_string())
}

fn slots(body: &str) -> Result<Batch, String> {
    decoded(&fuzz_parsers()[0], Codec::ElasticCtr, body)
}

#[test]
fn a_body_decodes_to_the_same_batch_as_named_slots() {
    let body = r#"{"instances":[
        {"slots":[{"slot_name":"7","feasigns":[6,"18446744073709551615"]},{"feasigns":[5],"slot_name":"0"}]},
        {},
        {"slots":[{"slot_name":"us\u0065r"}],"id":3}],"log":{}}"#;
    let named = r#"{"instances":[{"7":[6,18446744073709551615],"0":5},{},{}]}"#;
    let [parser, _] = fuzz_parsers();
    assert_eq!(slots(body).unwrap(), decoded(&parser, Codec::Json, named).unwrap());
    let body =
        r#"{"instances":[{"slots":[{"slot_name":"C1","feasigns":["68fd1e64"]},{"slot_name":"I1","feasigns":[3]}]}]}"#;
    let [_, criteo] = fuzz_parsers();
    let named = decoded(&criteo, Codec::Json, r#"{"instances":[{"C1":"68fd1e64","I1":3}]}"#).unwrap();
    assert_eq!(decoded(&criteo, Codec::ElasticCtr, body).unwrap(), named);
    assert_eq!(slots(r#"{"instances":[]}"#).unwrap().num_samples(), 0);
}

#[test]
fn invalid_values_are_named_with_their_instance() {
    let second = |slot: &str| slots(&format!(r#"{{"instances":[{{}},{{"slots":[{slot}]}}]}}"#)).unwrap_err();
    assert_eq!(second(r#"{"slot_name":"99","feasigns":[1]}"#), "instances[1]: unknown slot `99`");
    let twice = r#"{"slot_name":"7","feasigns":[1]},{"slot_name":"7","feasigns":[1]}"#;
    assert_eq!(second(twice), "instances[1]: `7`: given twice");
    let expected = "instances[1]: slot `7`: expected a u64, as a number or a string, or a list of them, got";
    assert_eq!(second(r#"{"slot_name":"7","feasigns":["x"]}"#), format!("{expected} `x`"));
    assert_eq!(second(r#"{"slot_name":"7","feasigns":[-1]}"#), format!("{expected} the number -1"));
    assert!(second(r#"{"slot_name":"7","feasigns":[[1]]}"#).starts_with("body: a number or a string"));
    assert!(second(r#"{"feasigns":[1]}"#).starts_with("body: missing field `slot_name`"));
    assert_eq!(slots("{}").unwrap_err(), "body: expected an object with `instances`, got none");
    assert_eq!(slots(r#"{"instances":[],"instances":[]}"#).unwrap_err(), "body: `instances`: given twice");
    let many = slots(r#"{"instances":[{},{},{},{}]}"#).unwrap_err();
    assert_eq!(many, "expected at most 3 instances in a request, got more");
}

proptest! {
    #[test]
    fn probabilities_are_of_the_first_label_and_sum_to_one(scores in prop::collection::vec((0f32..=1.0, 0f32..=1.0), 0..4)) {
        let info = super::super::VersionInfo::new("demo", "", 3, &["click".into(), "buy".into()]);
        let flat: Vec<f32> = scores.iter().flat_map(|&(click, buy)| [click, buy]).collect();
        let reply = AnswerFormat::ElasticCtr.write(&info, &flat).unwrap();
        let answer: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
        prop_assert_eq!((&answer["err_code"], &answer["err_msg"]), (&json!(0), &json!("")));
        let predictions = answer["predictions"].as_array().unwrap();
        prop_assert_eq!(predictions.len(), scores.len());
        for (prediction, (click, _)) in predictions.iter().zip(scores) {
            let [prob0, prob1] = ["prob0", "prob1"].map(|key| prediction[key].as_f64().unwrap() as f32);
            prop_assert_eq!((prob0, prob1), (1.0 - click, click));
        }
    }
}
