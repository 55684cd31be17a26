//! Requests of Paddle Serving's clients, and the errors of invalid requests.

use elasticrec_sample::{Batch, Features};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::json::fuzz_parsers;
use super::super::{AnswerFormat, Codec, fuzz_body};
use super::*;

const LIMITS: Limits = Limits { max_instances: 3 };

fn decoded(parser: &Parser, codec: Codec, body: &[u8]) -> Result<(Batch, AnswerFormat), String> {
    let mut builder = parser.builder(1);
    let wanted = codec.decode(parser, body, LIMITS, &mut builder).map_err(|error| error.to_string())?;
    Ok((builder.finish(), wanted))
}

fn json(parser: &Parser, body: Value) -> Result<Batch, String> {
    decoded(parser, Codec::Paddle(Encoding::Json), body.to_string().as_bytes()).map(|(batch, _)| batch)
}

fn proto(parser: &Parser, tensor: Vec<Tensor>) -> Result<Batch, String> {
    let request = Request { tensor, ..Request::default() };
    decoded(parser, Codec::Paddle(Encoding::Proto), &request.encode_to_vec()).map(|(batch, _)| batch)
}

fn named(parser: &Parser, body: Value) -> Batch {
    decoded(parser, Codec::Json, body.to_string().as_bytes()).unwrap().0
}

fn tensor(name: &str, shape: &[i32]) -> Tensor {
    Tensor { alias_name: name.into(), shape: shape.into(), ..Tensor::default() }
}

#[test]
fn ragged_and_even_tensors_are_slots() {
    let [parser, _] = fuzz_parsers();
    let expected = named(&parser, json!({"instances": [{"0": [5], "7": [6, u64::MAX]}, {"0": [8]}]}));
    let bytes = |signs: &[u64]| signs.iter().flat_map(|sign| sign.to_le_bytes()).collect::<Vec<u8>>().into();
    let even = Tensor { int64_data: vec![5, 8], ..tensor("0", &[2, 1]) };
    let ragged = Tensor { int64_data: vec![6, -1], lod: vec![0, 2, 2], ..tensor("7", &[2, 1]) };
    assert_eq!(proto(&parser, vec![even.clone(), ragged.clone()]).unwrap(), expected);
    // Tensors may be in any order, and may have the name of the program's variable instead of its alias.
    let content = Tensor { tensor_content: bytes(&[6, u64::MAX]), lod: vec![0, 2, 2], ..tensor("7", &[2]) };
    let by_name = Tensor { name: "0".into(), alias_name: "words".into(), ..even.clone() };
    assert_eq!(proto(&parser, vec![content, by_name]).unwrap(), expected);
    let body = json!({"tensor": [
        {"int64_data": [5, "8"], "elem_type": 0, "name": "0", "alias_name": "0", "shape": [2, 1], "lod": null, "x": 1},
        {"int64Data": ["6", u64::MAX], "aliasName": "7", "shape": ["2", 1.0], "lod": [0, 2, 2]}], "fetchVarNames": []});
    assert_eq!(json(&parser, body).unwrap(), expected);
    let narrow = Tensor { uint32_data: vec![5, 8], ..tensor("0", &[2]) };
    assert_eq!(proto(&parser, vec![narrow, ragged.clone()]).unwrap(), expected);
    let text = Tensor { data: vec!["5".into(), "8".into()], elem_type: 20, ..tensor("0", &[2]) };
    assert_eq!(proto(&parser, vec![text, ragged]).unwrap(), expected);
    for (elem_type, content) in [(2, &[5, 0, 0, 0, 8, 0, 0, 0][..]), (4, &[5, 0, 8, 0]), (7, &[5, 8]), (8, &[5, 8])] {
        let tensor_content = content.to_vec().into();
        let tensor = Tensor { tensor_content, elem_type, ..tensor("0", &[2, 1]) };
        assert_eq!(proto(&parser, vec![tensor]).unwrap().signs, [5, 8]);
    }
}

#[test]
fn dense_columns_come_one_by_one_or_all_at_once() {
    let [_, parser] = fuzz_parsers();
    let expected = named(&parser, json!({"instances": [{"C1": "a", "I1": 3, "I2": -0.25}, {"I1": 4, "I2": 0.5}]}));
    let c1 = Tensor { data: vec!["a".into(), String::new()], elem_type: 20, ..tensor("C1", &[2, 1]) };
    let values = vec![3.0, -0.25, 4.0, 0.5];
    for name in ["dense_input", "dense"] {
        let dense = Tensor { float_data: values.clone(), elem_type: 1, ..tensor(name, &[2, 2]) };
        assert_eq!(proto(&parser, vec![dense, c1.clone()]).unwrap(), expected);
    }
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let dense = Tensor { tensor_content: bytes.into(), elem_type: 1, ..tensor("dense", &[2, 2]) };
    assert_eq!(proto(&parser, vec![dense, c1.clone()]).unwrap(), expected);
    let one = Tensor { int_data: vec![3, 4], ..tensor("I1", &[2, 1]) };
    let other = Tensor { float64_data: vec![-0.25, 0.5], ..tensor("I2", &[2]) };
    assert_eq!(proto(&parser, vec![c1, one, other]).unwrap(), expected);
    let wide = Tensor { float_data: vec![1.0; 3], ..tensor("dense", &[1, 3]) };
    assert_eq!(proto(&parser, vec![wide]).unwrap_err(), "tensor[0]: `dense`: shape: expected [rows, 2], got [1, 3]");
}

#[test]
fn dense_columns_of_paddlerec_are_one_tensor_and_numbers_are_hashed_as_they_are_spelled() {
    let features = r#"{"format":"paddlerec","hash":1,"slots":[{"name":"1","pooling":"sum"}],"labels":["click"],
        "dense":[{"name":"dense_feature.0","normalize":{"kind":"none"}},{"name":"dense_feature.1","normalize":{"kind":"none"}}]}"#;
    let parser = Parser::new(Features::from_json(features).unwrap()).unwrap();
    let dense = Tensor { float_data: vec![0.5, 2.0], ..tensor("dense_feature", &[1, 2]) };
    let one = Tensor { int64_data: vec![737_395], ..tensor("1", &[1, 1]) };
    let (text, _) = decoded(&parser, Codec::Text, b"click:0 dense_feature:0.5 dense_feature:2 1:737395\n").unwrap();
    let got = proto(&parser, vec![one, dense]).unwrap();
    assert_eq!((got.signs, got.dense), (text.signs, text.dense));
    let negative = Tensor { int64_data: vec![-1], ..tensor("1", &[1, 1]) };
    let expected =
        "tensor[0]: row 0: slot `1`: expected a string or a whole number, or a list of them, got the number -1";
    assert_eq!(proto(&parser, vec![negative]).unwrap_err(), expected);
}

#[test]
fn invalid_tensors_are_named() {
    let [parser, criteo] = fuzz_parsers();
    let error = |tensor: Tensor| proto(&parser, vec![tensor]).unwrap_err();
    let signs = |shape: &[i32]| Tensor { int64_data: vec![1, 2], ..tensor("7", shape) };
    assert_eq!(proto(&parser, vec![]).unwrap_err(), "tensor: expected at least one tensor, got none");
    assert_eq!(error(tensor("99", &[0])), "tensor[0]: unknown slot `99`");
    assert_eq!(error(signs(&[])), "tensor[0]: `7`: shape: expected [rows, values], got none");
    assert_eq!(error(signs(&[-1, 2])), "tensor[0]: `7`: shape: expected sizes of at least 0, got [-1, 2]");
    assert_eq!(error(signs(&[3, 1])), "tensor[0]: `7`: expected the number of values of shape [3, 1], got 2");
    assert!(error(signs(&[i32::MAX; 4])).contains("expected the number of values of shape"));
    for lod in [&[0][..], &[0, 1], &[1, 2], &[0, 2, 1, 2], &[0, -1, 2], &[0, 3]] {
        let what = error(Tensor { lod: lod.into(), ..signs(&[2, 1]) });
        assert_eq!(what, format!("tensor[0]: `7`: lod: expected ascending offsets from 0 to 2, got {lod:?}"));
    }
    let both = Tensor { float_data: vec![1.0], ..signs(&[2]) };
    assert_eq!(error(both), "tensor[0]: `7`: expected values in one field, got several");
    let odd = Tensor { tensor_content: vec![1, 2, 3].into(), ..tensor("7", &[1]) };
    assert_eq!(error(odd), "tensor[0]: `7`: tensor_content: expected elements of 8 bytes, got 3 bytes");
    let half = Tensor { tensor_content: vec![1, 2].into(), elem_type: 5, ..tensor("7", &[1]) };
    assert!(error(half).contains("elem_type: expected one of 0, 1, 2, 3, 4, 7, 8"));
    let float = Tensor { float_data: vec![1.5], ..tensor("7", &[1]) };
    assert!(error(float).starts_with("tensor[0]: row 0: slot `7`: expected a u64"));
    let two = proto(&parser, vec![signs(&[2]), Tensor { int64_data: vec![1], ..tensor("0", &[1]) }]).unwrap_err();
    assert_eq!(two, "tensor[0]: expected 1 rows as in tensor[1], got 2");
    assert_eq!(proto(&parser, vec![signs(&[2]), signs(&[2])]).unwrap_err(), "tensor[1]: `7`: given twice");
    let dense = Tensor { float_data: vec![1.0; 2], ..tensor("dense", &[1, 2]) };
    let i1 = Tensor { float_data: vec![1.0], ..tensor("I1", &[1]) };
    assert_eq!(proto(&criteo, vec![dense, i1]).unwrap_err(), "tensor[1]: `I1`: given twice");
    let nan = Tensor { float_data: vec![f32::NAN], ..tensor("I1", &[1]) };
    let expected = "tensor[0]: row 0: dense `I1`: expected a finite number, got NaN";
    assert_eq!(proto(&criteo, vec![nan]).unwrap_err(), expected);
}

#[test]
fn rows_and_tensors_are_limited() {
    let [parser, _] = fuzz_parsers();
    let many = "expected at most 3 instances in a request, got more";
    assert_eq!(proto(&parser, vec![tensor("7", &[3, 0])]).unwrap().num_samples(), 3);
    assert_eq!(proto(&parser, vec![tensor("7", &[4, 0])]).unwrap_err(), many);
    assert_eq!(proto(&parser, vec![tensor("7", &[i32::MAX, 0])]).unwrap_err(), many);
    let lod = Tensor { lod: vec![0; 100], ..tensor("7", &[0, 1]) };
    assert_eq!(proto(&parser, vec![lod]).unwrap_err(), many);
    let limit = format!("body: expected at most {} tensors and names, got more", message::MAX_TENSORS);
    for empty in [b"\x0a\x00", b"\x12\x00"] {
        let body = empty.repeat(message::MAX_TENSORS + 1);
        assert_eq!(decoded(&parser, Codec::Paddle(Encoding::Proto), &body).unwrap_err(), limit);
    }
    let body = format!(r#"{{"tensor":[{}{{}}]}}"#, "{},".repeat(message::MAX_TENSORS));
    let refusal = decoded(&parser, Codec::Paddle(Encoding::Json), body.as_bytes()).unwrap_err();
    assert!(refusal.starts_with(&limit), "{refusal}");
}

#[test]
fn invalid_json_is_refused() {
    let [parser, _] = fuzz_parsers();
    let error = |body: &str| decoded(&parser, Codec::Paddle(Encoding::Json), body.as_bytes()).unwrap_err();
    assert!(error("").starts_with("body: EOF"));
    assert!(error(r#"{"tensor":3}"#).starts_with("body: invalid type: integer `3`, expected a list"));
    let value = |value: &str| error(&format!(r#"{{"tensor":[{{"int64_data":[{value}]}}]}}"#));
    for (written, got) in
        [("1.5", "1.5"), ("\"x\"", "`x`"), ("1e300", "1e300"), ("\"18446744073709551616\"", "`184467")]
    {
        let refusal = value(written);
        assert!(refusal.contains("expected an integer of 64 bits, got"), "{refusal} of {got}");
    }
    assert!(error(r#"{"tensor":[{"tensor_content":"?"}]}"#).starts_with("body: base64: "));
    assert!(error(r#"{"tensor":[{"shape":["3000000000"]}]}"#).contains("expected an i32, got `3000000000`"));
}

#[test]
fn an_answer_has_the_fetched_labels_and_the_id_of_the_request() {
    let [parser, _] = fuzz_parsers();
    let info = VersionInfo::new("demo", "b", 3, &["click".into(), "buy".into()]);
    let request = |names: &[&str]| Request {
        tensor: vec![tensor("7", &[2, 0])],
        fetch_var_names: names.iter().map(|name| name.to_string()).collect(),
        log_id: 77,
    };
    let wanted =
        |names: &[&str]| decoded(&parser, Codec::Paddle(Encoding::Proto), &request(names).encode_to_vec()).unwrap().1;
    let answer = |names: &[&str]| {
        let reply = wanted(names).write(&info, &[0.1, 0.2, 0.3, 0.4]).unwrap();
        Response::decode(reply.body).unwrap()
    };
    let response = answer(&[]);
    assert_eq!((response.log_id, response.err_no, response.err_msg.as_str()), (77, 0, ""));
    let ModelOutput { tensor: tensors, engine_name } = &response.outputs[0];
    assert_eq!(engine_name, "demo/3/b");
    let click = Tensor { name: "click".into(), elem_type: 1, float_data: vec![0.1, 0.3], ..tensor("click", &[2, 1]) };
    let buy = Tensor { name: "buy".into(), elem_type: 1, float_data: vec![0.2, 0.4], ..tensor("buy", &[2, 1]) };
    assert_eq!(tensors, &[click.clone(), buy.clone()]);
    assert_eq!(answer(&["buy"]).outputs[0].tensor, std::slice::from_ref(&buy));
    assert_eq!(answer(&["buy", "click"]).outputs[0].tensor, [buy, click]);
    let refusal = |names: &[&str]| wanted(names).check(&info).unwrap_err().to_string();
    assert_eq!(refusal(&["prob"]), "fetch_var_names: unknown output `prob`, expected one of `click`, `buy`");
    assert_eq!(refusal(&["click"; 3]), "fetch_var_names: expected at most 2, got 3");
    let body = r#"{"tensor":[{"alias_name":"7","shape":[1,0]}],"fetch_var_names":["buy"],"log_id":"77"}"#;
    let (_, wanted) = decoded(&parser, Codec::Paddle(Encoding::Json), body.as_bytes()).unwrap();
    let text = wanted.write(&info, &[0.1, 0.25]).unwrap().body;
    let expected = concat!(
        r#"{"outputs":[{"tensor":[{"float_data":[0.25],"elem_type":1,"shape":[1,1],"name":"buy","alias_name":"buy"}],"#,
        r#""engine_name":"demo/3/b"}],"log_id":77,"err_no":0,"err_msg":""}"#
    );
    assert_eq!(String::from_utf8_lossy(&text), expected);
}

#[test]
fn a_refusal_echoes_the_id_if_it_can_be_decoded() {
    let refused = Response { log_id: 5, err_no: -5000, err_msg: "no".into(), ..Response::default() };
    let body = Request { log_id: 5, ..Request::default() }.encode_to_vec();
    assert_eq!(Response::decode(Encoding::Proto.refusal(&body, -5000, "no")).unwrap(), refused);
    let text = Encoding::Json.refusal(br#"{"logId":5,"tensor":7}"#, -5000, "no");
    assert_eq!(&text[..], br#"{"outputs":[],"log_id":5,"err_no":-5000,"err_msg":"no"}"#);
    assert_eq!(Response::decode(Encoding::Proto.refusal(b"\xff", -5000, "no")).unwrap().log_id, 0);
}

/// Nearly valid requests.
fn hostile() -> impl Strategy<Value = Request> {
    let name = prop::sample::select(vec!["0", "7", "user", "C1", "I1", "dense", "", "99"]);
    let small = prop::collection::vec(prop_oneof![8 => 0i32..4, 1 => any::<i32>()], 0..4);
    let signs = prop::collection::vec(any::<i64>(), 0..4);
    let content = prop::collection::vec(any::<u8>(), 0..9);
    let tensor =
        (name, small.clone(), small, signs, content, -1i32..21).prop_map(|(name, shape, lod, signs, content, kind)| {
            let text = if kind == 20 { vec!["a".into(), "5".into()] } else { Vec::new() };
            let lod = if kind % 2 == 0 { lod } else { Vec::new() };
            let content = if signs.is_empty() { content } else { Vec::new() };
            Tensor {
                int64_data: signs,
                data: text,
                lod,
                elem_type: kind,
                tensor_content: content.into(),
                ..tensor(name, &shape)
            }
        });
    prop::collection::vec(tensor, 0..4).prop_map(|tensor| Request { tensor, ..Request::default() })
}

proptest! {
    #[test]
    fn nearly_valid_requests_are_decoded_or_refused_in_one_line(request in hostile(), num_dropped in 0usize..64) {
        let bytes = request.encode_to_vec();
        fuzz_body(&bytes);
        fuzz_body(&bytes[..bytes.len().saturating_sub(num_dropped)]);
        for tensor in &request.tensor {
            fuzz_body(json!({"tensor": [tensor]}).to_string().as_bytes());
        }
    }

    #[test]
    fn signs_are_decoded_unchanged(rows in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..4), 1..4)) {
        let [parser, _] = fuzz_parsers();
        let mut lod = vec![0];
        lod.extend(rows.iter().scan(0, |end, row| { *end += row.len() as i32; Some(*end) }));
        let signs: Vec<i64> = rows.iter().flatten().map(|&sign| sign as i64).collect();
        let tensor = Tensor { lod, int64_data: signs.clone(), ..tensor("7", &[signs.len() as i32, 1]) };
        let batch = proto(&parser, vec![tensor.clone()]).unwrap();
        prop_assert_eq!(&batch, &json(&parser, json!({"tensor": [tensor]})).unwrap());
        for (row, signs) in rows.iter().enumerate() {
            prop_assert_eq!(batch.signs_of(row, 1), &signs[..]);
        }
    }
}
