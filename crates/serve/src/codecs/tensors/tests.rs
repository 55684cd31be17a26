//! Valid tensors in every encoding, compared with the codec of named slots, and the errors of invalid tensors.

use elasticrec_sample::Batch;
use proptest::prelude::*;
use prost::Message;
use serde_json::{Value, json};

use super::super::json::fuzz_parsers;
use super::super::{AnswerFormat, Codec, VersionInfo, fuzz_body};
use super::proto::{InferTarget, ModelInferResponse};
use super::*;

const LIMITS: Limits = Limits { max_instances: 5 };

/// A request, independent of its encoding.
#[derive(Debug, Clone, Default)]
struct Request {
    inputs: Vec<TestTensor>,
    outputs: Vec<&'static str>,
}

/// A tensor, with its elements as JSON values.
#[derive(Debug, Clone)]
struct TestTensor {
    name: String,
    datatype: &'static str,
    shape: Vec<i64>,
    elements: Vec<Value>,
}

fn tensor(name: &str, datatype: &'static str, shape: &[i64], elements: Value) -> TestTensor {
    TestTensor { name: name.into(), datatype, shape: shape.into(), elements: elements.as_array().unwrap().clone() }
}

fn request(inputs: &[TestTensor]) -> Request {
    Request { inputs: inputs.into(), outputs: vec![] }
}

impl TestTensor {
    fn bytes(&self) -> Vec<u8> {
        let bytes = |element: &Value| match self.datatype {
            "BYTES" => {
                let text = element.as_str().unwrap().as_bytes();
                [&(text.len() as u32).to_le_bytes()[..], text].concat()
            }
            "UINT64" => element.as_u64().unwrap().to_le_bytes().into(),
            "INT64" => element.as_i64().unwrap().to_le_bytes().into(),
            "UINT32" => (element.as_u64().unwrap() as u32).to_le_bytes().into(),
            "INT32" => (element.as_i64().unwrap() as i32).to_le_bytes().into(),
            "FP32" => (element.as_f64().unwrap() as f32).to_le_bytes().into(),
            "FP64" => element.as_f64().unwrap().to_le_bytes().into(),
            other => panic!("{other}"),
        };
        self.elements.iter().flat_map(bytes).collect()
    }

    /// An `InferInputTensor`.
    fn proto(&self, contents: Option<Vec<u8>>) -> Vec<u8> {
        let shape: Vec<u8> = self.shape.iter().flat_map(|&dim| varint(dim as u64)).collect();
        let mut out = [field(1, self.name.as_bytes()), field(2, self.datatype.as_bytes()), field(3, &shape)].concat();
        out.extend(contents.map(|contents| field(5, &contents)).unwrap_or_default());
        out
    }

    /// An `InferTensorContents`.
    fn contents(&self) -> Vec<u8> {
        let whole = |number| field(number, &self.elements.iter().flat_map(|one| varint(bits(one))).collect::<Vec<_>>());
        match self.datatype {
            "BYTES" => self.elements.iter().flat_map(|text| field(8, text.as_str().unwrap().as_bytes())).collect(),
            "INT32" => whole(2),
            "INT64" => whole(3),
            "UINT32" => whole(4),
            "UINT64" => whole(5),
            "FP32" => field(6, &self.bytes()),
            "FP64" => field(7, &self.bytes()),
            other => panic!("{other}"),
        }
    }
}

fn bits(number: &Value) -> u64 {
    number.as_u64().unwrap_or_else(|| number.as_i64().unwrap() as u64)
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = vec![];
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
    [varint(u64::from(number) << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

/// The encodings of a request: JSON, JSON with binary data after it, gRPC with raw contents and with typed contents.
impl Request {
    fn json(&self) -> (Codec, Vec<u8>) {
        let inputs = self.inputs.iter().map(|input| {
            json!({"name": input.name, "datatype": input.datatype, "shape": input.shape, "data": input.elements})
        });
        let outputs: Vec<Value> = self.outputs.iter().map(|name| json!({"name": name})).collect();
        let mut body = json!({"id": "7", "inputs": inputs.collect::<Vec<_>>()});
        if !outputs.is_empty() {
            body["outputs"] = json!(outputs);
        }
        (Codec::TensorsJson { json_bytes: None }, body.to_string().into_bytes())
    }

    fn binary(&self) -> (Codec, Vec<u8>) {
        let inputs = self.inputs.iter().map(|input| {
            let size = json!({"binary_data_size": input.bytes().len()});
            json!({"name": input.name, "datatype": input.datatype, "shape": input.shape, "parameters": size})
        });
        let parameters = json!({"binary_data_output": true});
        let head = json!({"id": "7", "parameters": parameters, "inputs": inputs.collect::<Vec<_>>()});
        let mut body = head.to_string().into_bytes();
        let json_bytes = Some(body.len());
        self.inputs.iter().for_each(|input| body.extend(input.bytes()));
        (Codec::TensorsJson { json_bytes }, body)
    }

    fn proto_head(&self) -> Vec<u8> {
        let mut body = [field(1, b"demo"), field(2, b"3"), field(3, b"7")].concat();
        self.outputs.iter().for_each(|name| body.extend(field(6, &field(1, name.as_bytes()))));
        body
    }

    fn raw(&self) -> (Codec, Vec<u8>) {
        let mut body = self.proto_head();
        self.inputs.iter().for_each(|input| body.extend(field(5, &input.proto(None))));
        self.inputs.iter().for_each(|input| body.extend(field(7, &input.bytes())));
        (Codec::TensorsProto, body)
    }

    fn typed(&self) -> (Codec, Vec<u8>) {
        let mut body = self.proto_head();
        self.inputs.iter().for_each(|input| body.extend(field(5, &input.proto(Some(input.contents())))));
        (Codec::TensorsProto, body)
    }

    fn encodings(&self) -> [(Codec, Vec<u8>); 4] {
        [self.json(), self.binary(), self.raw(), self.typed()]
    }

    /// Decodes every encoding, checks that the outcomes are equal except for errors of the data, and returns the first.
    fn decode_all(&self, parser: &Parser) -> Result<Batch, String> {
        let mut all =
            self.encodings().into_iter().map(|(codec, body)| decoded(parser, codec, &body).map(|(batch, _)| batch));
        let first = all.next().unwrap();
        for other in all {
            match (&first, &other) {
                (Err(first), Err(other)) if first.contains(": data: ") || other.contains("contents: ") => (),
                _ => assert_eq!(first, other),
            }
        }
        first
    }
}

fn decoded(parser: &Parser, codec: Codec, body: &[u8]) -> Result<(Batch, AnswerFormat), String> {
    let mut builder = parser.builder(1);
    let decoded = codec.decode(parser, body, LIMITS, &mut builder);
    decoded.map(|wanted| (builder.finish(), wanted)).map_err(|error| error.to_string())
}

/// Returns the batch of instances with named slots.
fn plain(parser: &Parser, instances: Value) -> Batch {
    decoded(parser, Codec::Json, json!({ "instances": instances }).to_string().as_bytes()).unwrap().0
}

fn slots_parser() -> Parser {
    let [slots, _] = fuzz_parsers();
    slots
}

fn criteo_parser() -> Parser {
    let [_, criteo] = fuzz_parsers();
    criteo
}

fn parser(features: &str) -> Parser {
    Features::from_json(features).and_then(Parser::new).unwrap()
}

fn slots(inputs: &[TestTensor]) -> Result<Batch, String> {
    request(inputs).decode_all(&slots_parser())
}

fn criteo(inputs: &[TestTensor]) -> Result<Batch, String> {
    request(inputs).decode_all(&criteo_parser())
}

#[test]
fn signs_of_slots_come_in_all_shapes_and_whole_numbers() {
    let parser = slots_parser();
    let expected = plain(&parser, json!([{"0": 5, "7": [6, 7]}, {"0": u64::MAX, "7": [8, 6]}]));
    let zero = |datatype, elements| tensor("0", datatype, &[2], elements);
    let seven = |datatype| tensor("7", datatype, &[2, 2], json!([6, 7, 8, 6]));
    for (one, two) in [
        (zero("UINT64", json!([5, u64::MAX])), seven("UINT64")),
        (zero("INT64", json!([5, -1])), seven("INT64")),
        (zero("BYTES", json!(["5", "18446744073709551615"])), seven("UINT32")),
        (tensor("0", "UINT64", &[2, 1], json!([5, u64::MAX])), seven("INT32")),
    ] {
        assert_eq!(slots(&[two.clone(), one.clone()]).unwrap(), expected);
        assert_eq!(slots(&[one, two]).unwrap(), expected);
    }
}

#[test]
fn slots_with_different_numbers_of_values_have_lengths() {
    let parser = slots_parser();
    let expected = plain(&parser, json!([{"7": [6, 7, 8]}, {"0": 1}, {"7": 9}]));
    let lengths = |datatype| tensor("7.lengths", datatype, &[3], json!([3, 0, 1]));
    let zero = [tensor("0", "UINT64", &[1], json!([1])), tensor("0.lengths", "INT32", &[3, 1], json!([0, 1, 0]))];
    for (values, lengths) in [("UINT64", "INT32"), ("INT32", "INT64"), ("INT64", "INT64")] {
        let seven = [tensor("7", values, &[4], json!([6, 7, 8, 9])), self::lengths_of("7", lengths)];
        assert_eq!(slots(&[zero.clone(), seven].concat()).unwrap(), expected);
    }
    let refused = |values: i64, lengths: TestTensor| {
        let elements = json!((0..values).collect::<Vec<_>>());
        slots(&[tensor("7", "UINT64", &[values], elements), lengths]).unwrap_err()
    };
    let sum = "input `7.lengths`: expected a sum of 5, the number of values of the slot, got 4";
    assert_eq!(refused(5, lengths("INT32")), sum);
    let negative = tensor("7.lengths", "INT64", &[2], json!([-1, 2]));
    assert_eq!(refused(1, negative), "input `7.lengths`: expected lengths of at least 0, got -1");
    let huge = tensor("7.lengths", "INT64", &[2], json!([i64::MAX, i64::MAX]));
    assert!(refused(1, huge).starts_with("input `7.lengths`: expected a sum of 1"));
    let alone = slots(&[lengths("INT32")]).unwrap_err();
    assert_eq!(alone, "input `7.lengths`: expected the values of slot `7` too, got none");
    let wide = slots(&[tensor("7", "UINT64", &[2, 2], json!([1, 2, 3, 4])), lengths("INT32")]).unwrap_err();
    assert_eq!(wide, "input `7`: shape: expected [N] together with `7.lengths`, got [2, 2]");
}

fn lengths_of(slot: &str, datatype: &'static str) -> TestTensor {
    tensor(&format!("{slot}.lengths"), datatype, &[3], json!([3, 0, 1]))
}

#[test]
fn text_numbers_and_all_dense_values_at_once_give_the_batch_of_named_slots() {
    let parser = criteo_parser();
    let expected = plain(
        &parser,
        json!([{"C1": "68fd1e64", "C26": "x y", "I1": 3, "I2": -0.25}, {"C26": "é", "I1": 0.5, "I2": 7}]),
    );
    let text =
        [tensor("C1", "BYTES", &[2, 1], json!(["68fd1e64", ""])), tensor("C26", "BYTES", &[2], json!(["x y", "é"]))];
    let columns = [tensor("I1", "FP32", &[2], json!([3.0, 0.5])), tensor("I2", "FP64", &[2, 1], json!([-0.25, 7.0]))];
    let all = [tensor("dense", "FP32", &[2, 2], json!([3.0, -0.25, 0.5, 7.0]))];
    assert_eq!(criteo(&[&text[..], &columns].concat()).unwrap(), expected);
    assert_eq!(criteo(&[&text[..], &all].concat()).unwrap(), expected);
}

#[test]
fn signs_all_at_once_are_the_hashes_of_the_values() {
    let parser = criteo_parser();
    let expected = plain(&parser, json!([{"C1": "a", "C26": "b", "I1": 3, "I2": 1}, {"C1": "c", "C26": "d", "I1": 9}]));
    let sign = |slot, value: &str| parser.sign(slot, value.as_bytes());
    let signs = json!([sign(0, "a"), sign(1, "b"), sign(0, "c"), sign(1, "d")]);
    let signs = tensor("signs", "UINT64", &[2, 2], signs);
    let both = [signs.clone(), tensor("dense", "FP32", &[2, 2], json!([3.0, 1.0, 9.0, 0.0]))];
    assert_eq!(criteo(&both).unwrap(), expected);
    // A dense value that is not given has no bucket.
    let batch = criteo(&[signs]).unwrap();
    assert_eq!(batch.offsets, [0, 1, 2, 2, 3, 4, 4]);
}

#[test]
fn signs_are_keys_as_the_job_makes_them() {
    let slot = |more: &str| format!(r#"[{{"name":"a","pooling":"sum"{more}}},{{"name":"b","pooling":"sum"}}]"#);
    let features = |slots: String, more: &str| {
        format!(r#"{{"format":"slots","hash":1,"slots":{slots},"dense":[],"labels":["click"]{more}}}"#)
    };
    let wide = slot(r#","sequence":1"#);
    for features in [
        features(slot(""), r#","modulo":10"#),
        features(slot(""), r#","separate_slots":true"#),
        features(slot(""), r#","padding":"12""#),
        features(wide, ""),
    ] {
        let parser = parser(&features);
        let expected = plain(&parser, json!([{"a": 12, "b": 13}, {"a": 14, "b": 12}]));
        let all = tensor("signs", "UINT64", &[2, 2], json!([12, 13, 14, 12]));
        let each = [tensor("a", "INT64", &[2], json!([12, 14])), tensor("b", "UINT64", &[2], json!([13, 12]))];
        assert_eq!(request(&[all]).decode_all(&parser).unwrap(), expected, "{features}");
        assert_eq!(request(&each).decode_all(&parser).unwrap(), expected, "{features}");
        let several = tensor("a", "UINT64", &[2, 2], json!([12, 3, 4, 5]));
        let expected = plain(&parser, json!([{"a": [12, 3]}, {"a": [4, 5]}]));
        assert_eq!(request(&[several]).decode_all(&parser).unwrap(), expected, "{features}");
    }
    let hashed = parser(
        r#"{"format":"paddlerec","hash":1,"slots":[{"name":"a","pooling":"sum"}],"dense":[],"labels":["click"],
            "modulo":1000,"padding":"12"}"#,
    );
    // The padding is text here, so a sign with the number 12 is not padding.
    let batch =
        request(&[tensor("signs", "UINT64", &[2, 1], json!([12, hashed.sign(0, b"x")]))]).decode_all(&hashed).unwrap();
    assert_eq!(batch.signs, [12, hashed.sign(0, b"x")]);
    let numbers = tensor("a", "INT32", &[3], json!([5, 12, 70]));
    assert_eq!(
        request(&[numbers]).decode_all(&hashed).unwrap(),
        plain(&hashed, json!([{"a": 5}, {"a": 12}, {"a": "70"}]))
    );
    let refusal = request(&[tensor("a", "INT64", &[1], json!([-5]))]).decode_all(&hashed).unwrap_err();
    let expected = "a string or a whole number, or a list of them";
    assert_eq!(refusal, format!("instances[0]: slot `a`: expected {expected}, got the number -5"));
}

#[test]
fn a_slot_called_signs_is_a_slot() {
    let parser = parser(
        r#"{"format":"slots","hash":1,"slots":[{"name":"signs","pooling":"sum"},{"name":"x","pooling":"sum"}],
            "dense":[],"labels":["click"]}"#,
    );
    let batch = request(&[tensor("signs", "UINT64", &[1, 3], json!([1, 2, 3]))]).decode_all(&parser).unwrap();
    assert_eq!(batch.signs_of(0, 0), [1, 2, 3]);
    assert_eq!(inputs(parser.features()).iter().filter(|input| input.name == "signs").count(), 1);
}

#[test]
fn invalid_tensors_are_named() {
    let two = json!([1, 2]);
    let zero = tensor("0", "UINT64", &[2], two.clone());
    for (inputs, refusal) in [
        (vec![], "inputs: expected at least one, got none"),
        (
            vec![tensor("zz", "UINT64", &[2], two.clone())],
            "input `zz`: unknown, expected an input of the model's metadata",
        ),
        (vec![zero.clone(), zero.clone()], "input `0`: given twice"),
        (
            vec![zero.clone(), tensor("7", "UINT64", &[1], json!([1]))],
            "input `7`: shape: expected 2 rows as in `0`, got 1",
        ),
        (vec![tensor("signs", "UINT64", &[2, 1], two.clone())], "input `signs`: shape: expected [B, 3], got [2, 1]"),
        (
            vec![zero.clone(), tensor("signs", "UINT64", &[2, 3], json!([1, 2, 3, 4, 5, 6]))],
            "input `0`: given twice, also in `signs`",
        ),
        (
            vec![tensor("0", "FP32", &[2], json!([1.0, 2.0]))],
            "input `0`: datatype: expected one of UINT64, INT64, UINT32, INT32, BYTES, got FP32",
        ),
        (
            vec![tensor("0", "UINT64", &[1, 2, 1], two.clone())],
            "input `0`: shape: expected [B] or [B, K], got [1, 2, 1]",
        ),
        (vec![tensor("0", "UINT64", &[], json!([1]))], "input `0`: shape: expected [B] or [B, K], got []"),
        (vec![tensor("0", "UINT64", &[-2], two.clone())], "input `0`: shape: expected [B] or [B, K], got [-2]"),
        (
            vec![tensor("0", "INT32", &[2], json!([5, -1]))],
            "instances[1]: slot `0`: expected a u64, as a number or a string, or a list of them, got the number -1",
        ),
        (
            vec![tensor("0", "BYTES", &[2], json!(["5", "x"]))],
            "instances[1]: slot `0`: expected a u64, as a number or a string, or a list of them, got `x`",
        ),
        (
            vec![tensor("0", "UINT64", &[6], json!([1, 2, 3, 4, 5, 6]))],
            "expected at most 5 instances in a request, got more",
        ),
        (vec![tensor("0", "UINT64", &[i64::MAX, 0], json!([]))], "expected at most 5 instances in a request, got more"),
    ] {
        assert_eq!(slots(&inputs).unwrap_err(), refusal);
    }
    let refusal = criteo(&[tensor("C1", "UINT64", &[1], json!([1]))]).unwrap_err();
    assert_eq!(refusal, "input `C1`: datatype: expected BYTES, got UINT64");
    let refusal = criteo(&[tensor("I1", "FP32", &[1, 2], json!([1.0, 2.0]))]).unwrap_err();
    assert_eq!(refusal, "input `I1`: shape: expected [B, 1], got [1, 2]");
    let refusal = criteo(&[tensor("I1", "FP64", &[1], json!([1e300]))]).unwrap_err();
    assert_eq!(refusal, "instances[0]: dense `I1`: expected a finite number, got inf");
}

#[test]
fn wrong_sizes_are_refused_before_data_is_read() {
    let parser = slots_parser();
    let refusal = |codec, body: &[u8]| decoded(&parser, codec, body).map(|_| ()).unwrap_err();
    for shape in [vec![3], vec![1], vec![2, 2], vec![i64::MAX], vec![i64::MAX, i64::MAX]] {
        let wrong = request(&[tensor("0", "UINT64", &shape, json!([1, 2]))]);
        for (codec, body) in wrong.encodings() {
            let refusal = refusal(codec, &body);
            assert!(refusal.starts_with("input `0`: ") && refusal.contains(": expected "), "{refusal}");
        }
    }
    let (_, body) = request(&[tensor("0", "UINT64", &[2], json!([1, 2]))]).binary();
    let json_bytes = body.len() - 16;
    let codec = |json_bytes| Codec::TensorsJson { json_bytes: Some(json_bytes) };
    let expected = "input `0`: binary_data_size: expected at most 8, got 16";
    assert_eq!(refusal(codec(json_bytes), &body[..body.len() - 8]), expected);
    let more = [&body[..], b"xyz"].concat();
    assert_eq!(refusal(codec(json_bytes), &more), "body: expected no bytes after the last tensor, got 3");
    assert_eq!(refusal(codec(9999), b"{}"), "body: expected 9999 bytes of JSON, got 2");
    let none = br#"{"inputs":[{"name":"0","datatype":"UINT64","shape":[2]}]}"#;
    let expected = "input `0`: expected either `data` or the parameter `binary_data_size`";
    assert_eq!(refusal(Codec::TensorsJson { json_bytes: None }, none), expected);
    // Text with wrong lengths.
    let text = tensor("0", "BYTES", &[2], json!(["5", "6"]));
    for (num_dropped, expected) in [(1, "data: ends within element 1"), (6, "data: ends within element 0")] {
        let bytes = text.bytes();
        let body = [field(5, &text.proto(None)), field(7, &bytes[..bytes.len() - num_dropped])].concat();
        assert_eq!(refusal(Codec::TensorsProto, &body), format!("input `0`: {expected}"));
    }
    let body = [field(5, &text.proto(None)), field(7, &[&text.bytes()[..], b"zz"].concat())].concat();
    assert_eq!(refusal(Codec::TensorsProto, &body), "input `0`: data: expected no bytes after the last element, got 2");
}

#[test]
fn malformed_messages_are_refused() {
    let parser = slots_parser();
    let refusal = |body: &[u8]| decoded(&parser, Codec::TensorsProto, body).map(|_| ()).unwrap_err();
    let zero = tensor("0", "UINT64", &[2], json!([1, 2]));
    let expected = "raw_input_contents: expected one for each of 1 inputs, or none, got 2";
    assert_eq!(refusal(&[field(5, &zero.proto(None)), field(7, b""), field(7, b"")].concat()), expected);
    let both = [field(5, &zero.proto(Some(zero.contents()))), field(7, &zero.bytes())].concat();
    assert_eq!(refusal(&both), "input `0`: expected `contents` or `raw_input_contents`, got both");
    let other = tensor("0", "INT64", &[2], json!([1, 2]));
    let mixed = field(5, &zero.proto(Some(other.contents())));
    assert_eq!(refusal(&mixed), "input `0`: contents: expected only `uint64_contents`, got another field");
    assert_eq!(refusal(&field(5, &zero.proto(None))), "input `0`: uint64_contents: expected 2 x 1 elements, got 0");
    assert_eq!(refusal(&[0x2a, 5, 1]), "message: ends within a field of 5 bytes");
    assert_eq!(refusal(&[0x2b]), "message: groups are not supported");
    assert_eq!(refusal(&field(3, b"\xff")), "message: text is not UTF-8");
    assert_eq!(InferTarget::of(&request(&[zero]).raw().1), Ok(InferTarget { model: "demo", version: "3" }));
    assert!(InferTarget::of(&[0xff; 20]).is_err());
}

#[test]
fn elements_in_json_are_flat_or_nested_and_have_the_datatype() {
    let parser = slots_parser();
    let decode = |data: &str, datatype: &str| {
        let input = format!(r#"{{"name":"7","datatype":"{datatype}","shape":[2,2],"data":{data}}}"#);
        let body = format!(r#"{{"inputs":[{input}],"parameters":{{"priority":1}},"more":[]}}"#);
        decoded(&parser, Codec::TensorsJson { json_bytes: None }, body.as_bytes()).map(|(batch, _)| batch.signs)
    };
    assert_eq!(decode("[1,2,3,4]", "UINT64"), Ok(vec![1, 2, 3, 4]));
    assert_eq!(decode("[[1,2],[3,4]]", "UINT64"), Ok(vec![1, 2, 3, 4]));
    assert_eq!(decode(r#"[["1","2"],["3","4"]]"#, "BYTES"), Ok(vec![1, 2, 3, 4]));
    for (data, datatype, refusal) in [
        ("[1,2,3]", "UINT64", "data: expected 2 x 2 elements, got 3"),
        ("[1,2,3,-4]", "UINT64", "data: expected UINT64, got the number -4"),
        ("[1,2,3,4294967296]", "UINT32", "data: expected UINT32, got the number 4294967296"),
        ("[1,2,3,4.5]", "INT64", "data: expected INT64, got the number 4.5"),
        ("[1,2,3,\"4\"]", "INT64", "data: expected INT64, got the string `4`"),
        ("[1,2,3,4]", "BYTES", "data: expected BYTES, got the number 1"),
        ("[1,2,3,null]", "UINT64", "data: invalid type: null, expected UINT64"),
        ("[1,2,3,true]", "UINT64", "data: invalid type: boolean `true`, expected UINT64"),
    ] {
        assert_eq!(decode(data, datatype), Err(format!("input `7`: {refusal}")));
    }
    let known = "UINT64, INT64, UINT32, INT32, BYTES, FP32, FP64";
    let refusal = format!("input `7`: datatype: expected one of {known}, got `FP16`");
    assert_eq!(decode("[1,2,3,4]", "FP16"), Err(refusal));
    assert!(decode(&"[".repeat(500), "UINT64").is_err());
}

fn info(variant: &str) -> VersionInfo {
    VersionInfo::new("demo", variant, 3, &["click".into(), "buy".into()])
}

#[test]
fn answers_have_the_requested_outputs() {
    let parser = slots_parser();
    let zero = tensor("0", "UINT64", &[2], json!([1, 2]));
    let scores = [0.25, 0.5, 0.125, 1.0];
    let wanted = |(codec, body): (Codec, Vec<u8>)| decoded(&parser, codec, &body).unwrap().1;
    let all = request(std::slice::from_ref(&zero));
    let one = Request { outputs: vec!["buy"], ..all.clone() };

    let answer = wanted(all.json()).write(&info(""), &scores).unwrap();
    assert_eq!(answer.json_bytes, None);
    let expected = json!({"model_name": "demo", "model_version": "3", "id": "7", "outputs": [
        {"name": "click", "datatype": "FP32", "shape": [2], "data": [0.25, 0.125]},
        {"name": "buy", "datatype": "FP32", "shape": [2], "data": [0.5, 1.0]}]});
    assert_eq!(serde_json::from_slice::<Value>(&answer.body).unwrap(), expected);
    let answer = wanted(one.json()).write(&info("b"), &scores).unwrap();
    let answer: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(answer["parameters"], json!({"variant": "b"}));
    assert_eq!(answer["outputs"], json!([{"name": "buy", "datatype": "FP32", "shape": [2], "data": [0.5, 1.0]}]));

    let answer = wanted(all.binary()).write(&info(""), &scores).unwrap();
    let (head, bytes) = answer.body.split_at(answer.json_bytes.unwrap());
    let head: Value = serde_json::from_slice(head).unwrap();
    assert_eq!(head["outputs"][1]["parameters"], json!({"binary_data_size": 8}));
    assert_eq!(bytes, [0.25f32, 0.125, 0.5, 1.0].map(f32::to_le_bytes).concat());

    let answer = ModelInferResponse::decode(wanted(one.raw()).write(&info("b"), &scores).unwrap().body).unwrap();
    assert_eq!((answer.model_name.as_str(), answer.model_version.as_str(), answer.id.as_str()), ("demo", "3", "7"));
    assert_eq!(answer.parameters["variant"].string_param, "b");
    assert_eq!((answer.outputs.len(), answer.outputs[0].shape.as_slice()), (1, &[2][..]));
    assert_eq!(answer.raw_output_contents, [[0.5f32, 1.0].map(f32::to_le_bytes).concat()]);

    for (outputs, expected) in [
        (vec!["likes"], "outputs: unknown output `likes`, expected one of `click`, `buy`"),
        (vec!["buy", "click", "buy"], "outputs: `buy`: given twice"),
    ] {
        let one = Request { outputs, ..all.clone() };
        for encoded in [one.json(), one.raw()] {
            assert_eq!(wanted(encoded).check(&info("")).unwrap_err().to_string(), expected);
        }
    }
    assert!(wanted(one.raw()).check(&info("")).is_ok());
}

#[test]
fn metadata_lists_inputs_and_outputs() {
    let lines_of = |inputs: Vec<TensorInfo>| {
        let line = |input: TensorInfo| format!("{} {} {:?}", input.name, input.datatype, input.shape);
        inputs.into_iter().map(line).collect::<Vec<_>>()
    };
    let slots = lines_of(inputs(slots_parser().features()));
    assert_eq!(slots, ["0 UINT64 [-1, -1]", "7 UINT64 [-1, -1]", "user UINT64 [-1, -1]", "signs UINT64 [-1, 3]"]);
    let criteo = lines_of(inputs(criteo_parser().features()));
    let columns = ["C1 BYTES [-1, -1]", "C26 BYTES [-1, -1]", "I1 FP32 [-1, 1]", "I2 FP32 [-1, 1]"];
    assert_eq!(criteo[..4], columns);
    assert_eq!(criteo[4..], ["signs UINT64 [-1, 2]", "dense FP32 [-1, 2]"]);
    assert_eq!(lines_of(outputs(&["click".into()])), ["click FP32 [-1]"]);
}

/// Samples for the criteo parser: text of both slots, and two numbers.
fn rows() -> impl Strategy<Value = Vec<([String; 2], [f32; 2])>> {
    let row = (["[a-z é]{0,5}", "[a-z]{0,3}"], [-1e6f32..1e6, -10f32..10.0]);
    prop::collection::vec(row, 0..5)
}

proptest! {
    #[test]
    fn random_tensors_of_text_and_numbers_give_the_batch_of_named_slots(rows in rows()) {
        let parser = criteo_parser();
        let instances: Vec<Value> = rows.iter().map(|([c1, c26], [i1, i2])| {
            json!({"C1": c1, "C26": c26, "I1": i1, "I2": i2})
        }).collect();
        let num = rows.len() as i64;
        let text = |at: usize| rows.iter().map(|(text, _)| json!(text[at])).collect::<Vec<_>>();
        let column = |at: usize| rows.iter().map(|(_, dense)| json!(dense[at])).collect::<Vec<_>>();
        let all = rows.iter().flat_map(|(_, dense)| dense.map(|value| json!(value))).collect::<Vec<_>>();
        let texts = [tensor("C1", "BYTES", &[num, 1], json!(text(0))), tensor("C26", "BYTES", &[num], json!(text(1)))];
        let columns = [tensor("I1", "FP32", &[num], json!(column(0))), tensor("I2", "FP32", &[num, 1], json!(column(1)))];
        let expected = plain(&parser, json!(instances));
        prop_assert_eq!(&criteo(&[&texts[..], &columns].concat()).unwrap(), &expected);
        let all = tensor("dense", "FP32", &[num, 2], json!(all));
        prop_assert_eq!(&criteo(&[&texts[..], &[all]].concat()).unwrap(), &expected);
    }

    #[test]
    fn random_signs_give_the_batch_of_named_slots(
        rows in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..4), 0..5),
        ones in prop::collection::vec(any::<u64>(), 5),
    ) {
        let parser = slots_parser();
        let num = rows.len();
        let instances = rows.iter().zip(&ones).map(|(row, one)| json!({"7": row, "user": one})).collect::<Vec<_>>();
        let lengths = rows.iter().map(|row| json!(row.len())).collect::<Vec<_>>();
        let flat = rows.concat();
        let tensors = [
            tensor("user", "UINT64", &[num as i64], json!(ones[..num])),
            tensor("7", "UINT64", &[flat.len() as i64], json!(flat)),
            tensor("7.lengths", "INT32", &[num as i64], json!(lengths)),
        ];
        prop_assert_eq!(slots(&tensors).unwrap(), plain(&parser, json!(instances)));
    }

    #[test]
    fn changed_or_truncated_bytes_never_panic(
        at in any::<prop::sample::Index>(), byte in any::<u8>(), end in any::<prop::sample::Index>(), encoding in 0usize..4,
    ) {
        let tensors = [
            tensor("7", "UINT64", &[2, 2], json!([6, 7, 8, 9])),
            tensor("0", "BYTES", &[2], json!(["5", "6"])),
            tensor("user", "INT64", &[1], json!([5])),
            tensor("user.lengths", "INT32", &[2], json!([0, 1])),
        ];
        let (codec, mut body) = request(&tensors).encodings()[encoding].clone();
        let at = at.index(body.len());
        body[at] = byte;
        body.truncate(end.index(body.len()) + 1);
        let _ = decoded(&slots_parser(), codec, &body);
        fuzz_body(&body);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        fuzz_body(&bytes);
    }
}

/// Measures the cost of decoding: run by hand in release, with `--ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn how_long_128_instances_take() {
    let names = (0..26).map(|slot| format!(r#"{{"name":"C{}","pooling":"sum"}}"#, slot + 1)).collect::<Vec<_>>();
    let dense = (1..=13).map(|at| format!(r#"{{"name":"I{at}","normalize":{{"kind":"log"}}}}"#)).collect::<Vec<_>>();
    let features = |format: &str, dense: &str| {
        let slots = names.join(",");
        parser(&format!(r#"{{"format":"{format}","hash":1,"slots":[{slots}],"dense":[{dense}],"labels":["click"]}}"#))
    };
    let sign = |at: u64| json!(at.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let all = tensor("signs", "UINT64", &[128, 26], json!((0..128 * 26).map(sign).collect::<Vec<_>>()));
    let numbers = json!((0..128 * 13).map(|at| json!(f64::from(at % 300))).collect::<Vec<_>>());
    let numbers = tensor("dense", "FP32", &[128, 13], numbers);
    let each = (0..26).map(|slot| {
        tensor(&format!("C{}", slot + 1), "UINT64", &[128, 1], json!((0..128).map(sign).collect::<Vec<_>>()))
    });
    let (criteo, slots) = (features("criteo", &dense.join(",")), features("slots", ""));
    for (name, parser, request) in [
        ("signs + dense", &criteo, request(&[all.clone(), numbers])),
        ("signs", &slots, request(&[all])),
        ("26 slots", &slots, request(&each.collect::<Vec<_>>())),
    ] {
        for (encoding, (codec, body)) in ["json", "binary", "raw", "typed"].iter().zip(request.encodings()) {
            let mut builder = parser.builder(128);
            let mut best = std::time::Duration::MAX;
            for _ in 0..200 {
                builder.truncate(0);
                let started = std::time::Instant::now();
                codec.decode(parser, &body, Limits { max_instances: 1000 }, &mut builder).unwrap();
                best = best.min(started.elapsed());
            }
            println!("{name}, {encoding}: {best:?}");
        }
    }
}
