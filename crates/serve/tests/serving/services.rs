//! Compatible services over real sockets: calls of Paddle Serving, ElasticCTR and Cube get the scores and rows of the model.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use elasticrec_serve::ServerHandle;
use prost::Message;
use serde_json::{Value, json};

use crate::serve::serve;
use crate::support::{TestModel, assert_close, ort_library};

const LONG: Duration = Duration::from_secs(60);

/// The fields of Paddle Serving's messages that these tests use.
#[derive(Clone, PartialEq, Message)]
struct Tensor {
    #[prost(int64, repeated, tag = "1")]
    int64_data: Vec<i64>,
    #[prost(float, repeated, tag = "2")]
    float_data: Vec<f32>,
    #[prost(int32, repeated, tag = "11")]
    shape: Vec<i32>,
    #[prost(int32, repeated, tag = "12")]
    lod: Vec<i32>,
    #[prost(string, tag = "14")]
    alias_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(message, repeated, tag = "1")]
    tensor: Vec<Tensor>,
    #[prost(uint64, tag = "4")]
    log_id: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Output {
    #[prost(message, repeated, tag = "1")]
    tensor: Vec<Tensor>,
    #[prost(string, tag = "2")]
    engine_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(message, repeated, tag = "1")]
    outputs: Vec<Output>,
    #[prost(uint64, tag = "4")]
    log_id: u64,
    #[prost(int32, tag = "5")]
    err_no: i32,
    #[prost(string, tag = "6")]
    err_msg: String,
}

/// Two rows: slot 0 has 5 and nothing, slot 7 has three signs and one.
fn request() -> Request {
    let tensor = |name: &str, signs: &[u64], lod: &[i32]| Tensor {
        int64_data: signs.iter().map(|&sign| sign as i64).collect(),
        shape: vec![signs.len() as i32, 1],
        lod: lod.into(),
        alias_name: name.into(),
        ..Tensor::default()
    };
    let slots = [tensor("7", &[6, u64::MAX, 1_000_000, 8], &[0, 3, 4]), tensor("0", &[5], &[0, 1, 1])];
    Request { tensor: slots.into(), log_id: 99 }
}

fn expected(model: &TestModel) -> Vec<f32> {
    let rows =
        [model.expected(&[("0", &[5]), ("7", &[6, u64::MAX, 1_000_000])], &[]), model.expected(&[("7", &[8])], &[])];
    rows.concat()
}

/// The scores `[rows, labels]` in an answer.
fn scores(response: &Response) -> Vec<f32> {
    assert_eq!((response.err_no, response.log_id), (0, 99), "{}", response.err_msg);
    let tensors = &response.outputs[0].tensor;
    assert_eq!(tensors.iter().map(|tensor| tensor.alias_name.as_str()).collect::<Vec<_>>(), ["click", "buy"]);
    assert!(tensors.iter().all(|tensor| tensor.shape == [2, 1]));
    (0..2).flat_map(|row| tensors.iter().map(move |tensor| tensor.float_data[row])).collect()
}

struct HttpAnswer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl HttpAnswer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

fn post(server: &ServerHandle, path: &str, content_type: &str, body: &[u8]) -> HttpAnswer {
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let length = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {content_type}\r\n");
    stream.write_all(format!("{head}content-length: {length}\r\n\r\n").as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
    HttpAnswer { status: head.split(' ').nth(1).unwrap().parse().unwrap(), head, body: answer[end + 4..].to_vec() }
}

fn brpc(server: &ServerHandle, service: &str, method: &str, message: &[u8]) -> Vec<u8> {
    let field = |number: u8, bytes: &[u8]| [&[number << 3 | 2, bytes.len() as u8][..], bytes].concat();
    let names = [field(1, service.as_bytes()), field(2, method.as_bytes())].concat();
    let meta = [field(1, &names), vec![4 << 3, 7]].concat();
    let body_bytes = (meta.len() + message.len()) as u32;
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let head = [&b"PRPC"[..], &body_bytes.to_be_bytes(), &(meta.len() as u32).to_be_bytes()].concat();
    stream.write_all(&[&head[..], &meta, message].concat()).unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    let size = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap()) as usize;
    let mut body = vec![0; size(4)];
    stream.read_exact(&mut body).unwrap();
    let message = body.split_off(size(8));
    // error 0, no compression, the id of the call
    assert!(body.starts_with(b"\x12\x02\x08\x00") && body.ends_with(b"\x20\x07"), "{}", String::from_utf8_lossy(&body));
    message
}

const GENERAL_MODEL: &str = "baidu.paddle_serving.predictor.general_model.GeneralModelService";

#[test]
fn paddle_requests_get_the_scores_of_the_model_over_every_protocol() {
    let Some(library) = ort_library() else { return };
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    let server = serve(&model, dir.path(), &library);
    let message = request().encode_to_vec();
    let long_path = format!("/{GENERAL_MODEL}/inference");
    for path in ["/GeneralModelService/inference", "/GeneralModelService/debug", &long_path] {
        let got = post(&server, path, "application/proto", &message);
        assert_eq!(got.status, 200);
        assert!(got.head.contains("content-type: application/proto\r\n") && got.head.contains("elasticrec-version: 3"));
        let response = Response::decode(&got.body[..]).unwrap();
        assert_close(&scores(&response), &expected(&model));
        assert_eq!(response.outputs[0].engine_name, "demo/3");
    }
    for service in [GENERAL_MODEL, "GeneralModelService"] {
        let response = Response::decode(&brpc(&server, service, "inference", &message)[..]).unwrap();
        assert_close(&scores(&response), &expected(&model));
    }
    let body = json!({"log_id": 99, "fetch_var_names": ["buy"], "tensor": [
        {"alias_name": "7", "shape": [4, 1], "lod": [0, 3, 4], "int64_data": [6, "18446744073709551615", 1_000_000, 8]},
        {"name": "0", "shape": [1, 1], "lod": [0, 1, 1], "int64_data": [5], "elem_type": 0}]});
    let got = post(&server, "/GeneralModelService/inference", "application/json", body.to_string().as_bytes());
    let answer = got.json();
    assert_eq!((got.status, &answer["err_no"], &answer["log_id"]), (200, &json!(0), &json!(99)));
    let tensors = answer["outputs"][0]["tensor"].as_array().unwrap();
    assert_eq!((tensors.len(), &tensors[0]["name"], &tensors[0]["shape"]), (1, &json!("buy"), &json!([2, 1])));
    let values = tensors[0]["float_data"].as_array().unwrap();
    let values: Vec<f32> = values.iter().map(|value| value.as_f64().unwrap() as f32).collect();
    assert_close(&values, &[expected(&model)[1], expected(&model)[3]]);
}

#[test]
fn paddle_errors_are_in_the_answer() {
    let Some(library) = ort_library() else { return };
    let (dir, mut model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    model.rows.insert(666, vec![f32::NAN; 3]);
    let server = serve(&model, dir.path(), &library);
    let infer = |body: Value| {
        let got = post(&server, "/GeneralModelService/inference", "application/json", body.to_string().as_bytes());
        (got.status, got.json())
    };
    let slot = |name: &str, sign: u64| json!({"alias_name": name, "shape": [1, 1], "int64_data": [sign]});
    let refusal = |number: i32, text: &str| json!({"outputs": [], "log_id": 5, "err_no": number, "err_msg": text});
    let got = infer(json!({"tensor": [slot("99", 1)], "log_id": 5}));
    assert_eq!(got, (400, refusal(-5000, "tensor[0]: unknown slot `99`")));
    let got = infer(json!({"tensor": [slot("7", 1)], "log_id": 5, "fetch_var_names": ["prob"]}));
    assert_eq!(got, (400, refusal(-5000, "fetch_var_names: unknown output `prob`, expected one of `click`, `buy`")));
    let got = infer(json!({"tensor": [{"alias_name": "7", "shape": [101, 0]}], "log_id": 5}));
    assert_eq!(got, (413, refusal(-5002, "expected at most 100 instances in a request, got more")));
    let got = infer(json!({"tensor": [slot("7", 666)], "log_id": 5}));
    assert_eq!(got, (500, refusal(-5100, "sample 0: label `click`: expected a finite score, got NaN")));
    // A request that was refused for its outputs leaves nothing in the batch of the next one.
    let got = infer(json!({"tensor": [slot("7", 6)]}));
    assert_eq!(got.0, 200);
    let refused = Request { tensor: vec![], log_id: 6 }.encode_to_vec();
    let got = post(&server, "/GeneralModelService/inference", "application/proto", &refused);
    let response = Response::decode(&got.body[..]).unwrap();
    assert_eq!((got.status, response.err_no, response.log_id), (400, -5000, 6));
    assert!(got.head.contains("content-type: application/proto"));
    let response = Response::decode(&brpc(&server, GENERAL_MODEL, "inference", &refused)[..]).unwrap();
    assert_eq!((response.err_no, response.err_msg.as_str()), (-5000, "tensor: expected at least one tensor, got none"));
}

#[test]
fn elasticctr_requests_get_the_probabilities_of_the_first_label() {
    let Some(library) = ort_library() else { return };
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    let server = serve(&model, dir.path(), &library);
    let path = "/ElasticCTRPredictionService/inference";
    let body = json!({"instances": [
        {"slots": [{"slot_name": "0", "feasigns": [5]}, {"slot_name": "7", "feasigns": [6, u64::MAX, "1000000"]}]},
        {"slots": [{"slot_name": "7", "feasigns": [8]}]}]});
    // The default content type of curl.
    let got = post(&server, path, "application/x-www-form-urlencoded", body.to_string().as_bytes());
    let answer = got.json();
    assert_eq!((got.status, &answer["err_code"], &answer["err_msg"]), (200, &json!(0), &json!("")));
    let expected = expected(&model);
    for (prediction, click) in answer["predictions"].as_array().unwrap().iter().zip([expected[0], expected[2]]) {
        let [prob0, prob1] = ["prob0", "prob1"].map(|key| prediction[key].as_f64().unwrap() as f32);
        assert_close(&[prob0, prob1], &[1.0 - click, click]);
    }
    let got = post(&server, path, "application/json", br#"{"instances":[{"slots":[{"slot_name":"99"}]}]}"#);
    let refusal = json!({"predictions": [], "err_code": -5000, "err_msg": "instances[0]: unknown slot `99`"});
    assert_eq!((got.status, got.json()), (400, refusal));
}

#[test]
fn rows_are_those_of_the_model() {
    let Some(library) = ort_library() else { return };
    let (dir, model) = (tempfile::tempdir().unwrap(), TestModel::slots());
    let server = serve(&model, dir.path(), &library);
    let row = |sign: u64| model.rows[&sign].iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let seek = |body: Value| post(&server, "/DictService/seek", "application/json", body.to_string().as_bytes());
    let got = seek(json!({"keys": [5, 777_777, u64::MAX.to_string()], "version_required": true}));
    let there = |sign| json!({"status": 0, "value": STANDARD.encode(row(sign))});
    let values = json!([there(5), {"status": u32::MAX, "value": ""}, there(u64::MAX)]);
    assert_eq!((got.status, got.json()), (200, json!({"values": values, "version": "3"})));
    assert_eq!(seek(json!({"keys": []})).json(), json!({"values": []}));
    let many = seek(json!({"keys": vec![0; (1 << 16) + 1]}));
    let refusal = json!({"error": "keys: expected at most 65536, got 65537"});
    assert_eq!((many.status, many.json()), (400, refusal));
    // More keys than a socket thread looks up itself: packed, 1 to 99 ten times.
    let keys: Vec<u8> = (0..990).map(|at| 1 + (at % 99) as u8).collect();
    let message = [&[1 << 3 | 2, 0xde, 0x07][..], &keys, &[2 << 3, 1]].concat();
    let answer = brpc(&server, "rec.mcube.DictService", "seek", &message);
    let value = |key: u8| [&[0x0a, 16, 0x08, 0, 0x12, 12][..], &row(key.into())].concat();
    let expected: Vec<u8> = keys.iter().flat_map(|&key| value(key)).chain(*b"\x12\x013").collect();
    assert_eq!(answer, expected);
    let absent = brpc(&server, "DictService", "seek", &[0x08, 100]);
    assert_eq!(absent, [0x0a, 8, 0x08, 0xff, 0xff, 0xff, 0xff, 0x0f, 0x12, 0]);
}
