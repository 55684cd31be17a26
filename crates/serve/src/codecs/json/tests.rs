//! Valid bodies, and the errors of invalid bodies.

use elasticrec_sample::Batch;
use proptest::prelude::*;

use super::super::{Codec, DecodeError, Limits, fuzz_body};
use super::*;

const LIMITS: Limits = Limits { max_instances: 3 };

fn decoded(parser: &Parser, codec: Codec, body: &str) -> Result<Batch, DecodeError> {
    let mut builder = parser.builder(1);
    codec.decode(parser, body.as_bytes(), LIMITS, &mut builder).map(|_| builder.finish())
}

fn slots(body: &str) -> Result<Batch, String> {
    decoded(&fuzz_parsers()[0], Codec::Json, body).map_err(|error| error.to_string())
}

fn criteo(body: &str) -> Result<Batch, String> {
    decoded(&fuzz_parsers()[1], Codec::Json, body).map_err(|error| error.to_string())
}

/// The refusal of the second of two instances.
fn second(format: fn(&str) -> Result<Batch, String>, instance: &str) -> String {
    format(&format!(r#"{{"instances":[{{}},{instance}]}}"#)).unwrap_err()
}

#[test]
fn signs_are_numbers_or_strings_or_lists_of_both() {
    let body = r#" {"instances": [
        {"7": [123, "18446744073709551615", null, 123], "0": 18446744073709551615, "us\u0065r": "5"},
        {},
        {"7": null, "user": []}]} "#;
    let batch = slots(body).unwrap();
    assert_eq!(batch.signs_of(0, 0), [u64::MAX]);
    assert_eq!(batch.signs_of(0, 1), [123, u64::MAX, 123]);
    assert_eq!(batch.signs_of(0, 2), [5]);
    assert_eq!((batch.num_samples(), batch.signs.len()), (3, 5));
}

#[test]
fn named_values_and_lines_of_the_training_format_are_the_same_batch() {
    let [parser, criteo_parser] = fuzz_parsers();
    let text = decoded(&parser, Codec::Text, "- - 5:0 6:7 7:7\n0 0 8:user\n").unwrap();
    let json = slots(r#"{"instances":[{"7":[6,7],"0":5},{"user":"8"}]}"#).unwrap();
    assert_eq!(text, json);
    let mut fields = vec![""; 40];
    (fields[0], fields[1], fields[2], fields[14], fields[39]) = ("1", "3", "-0.25", "68fd1e64", "x y");
    let text = decoded(&criteo_parser, Codec::Text, &fields.join("\t")).unwrap();
    let json = criteo(r#"{"instances":[{"C1":"68fd1e64","C26":["x y"],"I1":3,"I2":-0.25}]}"#).unwrap();
    assert_eq!(text, json);
}

#[test]
fn missing_criteo_values_are_null_absent_or_empty() {
    let batch = criteo(r#"{"instances":[{"C1":null,"C26":"","I1":null},{"I2":-7}]}"#).unwrap();
    assert!(batch.signs.is_empty());
    assert_eq!(batch.dense, [0.0, 0.0, 0.0, -7.0]);
}

#[test]
fn an_empty_list_has_no_samples() {
    assert_eq!(slots(r#"{"instances":[]}"#).unwrap().num_samples(), 0);
}

#[test]
fn invalid_values_are_named_with_their_instance() {
    let expected = "instances[1]: slot `7`: expected a u64, as a number or a string, or a list of them, got";
    for (value, got) in [
        ("-1", "the number -1"),
        ("1.5", "the number 1.5"),
        ("18446744073709551616", "the number 18446744073709552000"),
        ("\"ab\\n\"", "`ab\\n`"),
        ("[5,\"\"]", "``"),
        ("true", "true"),
        ("{}", "an object"),
        ("[[1]]", "a list in a list"),
    ] {
        assert_eq!(second(slots, &format!("{{\"7\":{value}}}")), format!("{expected} {got}"));
    }
    let expected = "instances[1]: slot `C1`: expected a string as in the training data, or a list of them, got";
    assert_eq!(second(criteo, r#"{"C1":5}"#), format!("{expected} the number 5"));
    assert_eq!(second(criteo, r#"{"C1":["a",-5]}"#), format!("{expected} the number -5"));
    let expected = "instances[1]: dense `I1`: expected a number, got";
    assert_eq!(second(criteo, r#"{"I1":[5]}"#), format!("{expected} a list"));
    assert_eq!(second(criteo, r#"{"I1":"5"}"#), format!("{expected} the string `5`"));
    assert_eq!(second(criteo, r#"{"I1":1e39}"#), "instances[1]: dense `I1`: expected a finite number, got inf");
}

#[test]
fn unknown_and_repeated_names_are_refused() {
    assert_eq!(second(slots, r#"{"C99":1}"#), "instances[1]: unknown slot `C99`");
    assert_eq!(second(criteo, r#"{"I1":1,"I1":1}"#), "instances[1]: `I1`: given twice");
    assert_eq!(second(slots, r#"{"7":1,"0":1,"7":2}"#), "instances[1]: `7`: given twice");
    assert_eq!(slots(r#"{"instances":[{"7":1},{"7":1}]}"#).unwrap().signs, [1, 1]);
    let long = second(slots, &format!("{{\"{}\":1}}", "x".repeat(1000)));
    assert_eq!(long, format!("instances[1]: unknown slot `{}…`", "x".repeat(40)));
}

#[test]
fn the_body_is_one_object_with_instances() {
    let error = |body: &str| slots(body).unwrap_err();
    assert_eq!(error("{}"), "body: expected an object with `instances`, got none");
    assert_eq!(error(r#"{"instances":[],"instances":[]}"#), "body: `instances`: given twice");
    assert_eq!(error(r#"{"inputs":[]}"#), "body: unknown key `inputs`, expected `instances`");
    assert_eq!(error(r#"{"instances":[]} x"#), "body: trailing characters at line 1 column 18");
    assert_eq!(error(r#"{"instances":[{"7":1}"#), "body: EOF while parsing a list at line 1 column 21");
    assert!(error("[1]").starts_with("body: invalid type: sequence, expected an object with `instances`"));
    assert!(error(r#"{"instances":3}"#).starts_with("body: invalid type: integer `3`, expected a list of instances"));
    assert!(second(slots, "[1]").contains("expected an object of named slots as instances[1]"));
    assert!(error("").starts_with("body: EOF"));
}

#[test]
fn instances_and_lines_are_limited() {
    let many = DecodeError::TooMany { what: "instances", max: 3 };
    let body = |count: usize| format!("{{\"instances\":[{}]}}", vec!["{}"; count].join(","));
    let [parser, _] = fuzz_parsers();
    assert_eq!(decoded(&parser, Codec::Json, &body(3)).unwrap().num_samples(), 3);
    assert_eq!(decoded(&parser, Codec::Json, &body(4)).unwrap_err(), many);
    assert_eq!(many.to_string(), "expected at most 3 instances in a request, got more");
    let text = |text: &str| decoded(&parser, Codec::Text, text);
    assert_eq!(text("0 0\n0 0\n0 0\n").unwrap().num_samples(), 3);
    assert_eq!(text("0 0\n0 0\n0 0\n0 0").unwrap_err(), DecodeError::TooMany { what: "lines", max: 3 });
    assert_eq!(text("0 0\n0 0 a:7\n").unwrap_err().to_string(), "line 2: slot `7`: sign `a` is not a u64");
}

/// Random pieces of bodies: random bytes alone would rarely get past the first brace.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let pieces = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "{\"instances\":[",
        "{\"7\":",
        "\"C1\":\"a\"",
        "\"I1\":",
        "1e39",
        "-1",
        "null",
        "18446744073709551616",
        "\\u0000",
        "\\ud800",
        "1 0 5:7\n",
        "\t",
        " ",
        "0",
        "\"instances\"",
        "true",
        "\n",
    ];
    let piece = prop_oneof![
        8 => prop::sample::select(pieces.to_vec()).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 1..4),
    ];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn hostile_bytes_are_refused_in_one_line(bytes in hostile()) {
        fuzz_body(&bytes);
    }

    #[test]
    fn signs_are_decoded_unchanged(samples in prop::collection::vec(
        prop::collection::btree_map(0usize..3, prop::collection::vec(any::<u64>(), 0..4), 0..3), 0..3
    )) {
        let names = ["0", "7", "user"];
        let instance = |slots: &std::collections::BTreeMap<usize, Vec<u64>>| {
            let slots = slots.iter().map(|(slot, signs)| format!("\"{}\":{signs:?}", names[*slot]));
            format!("{{{}}}", slots.collect::<Vec<_>>().join(","))
        };
        let body = samples.iter().map(instance).collect::<Vec<_>>().join(",");
        let batch = slots(&format!("{{\"instances\":[{body}]}}")).unwrap();
        for (b, sample) in samples.iter().enumerate() {
            for s in 0..3 {
                prop_assert_eq!(batch.signs_of(b, s), sample.get(&s).map_or(&[][..], Vec::as_slice));
            }
        }
    }
}
