//! Codecs: the bytes of a body in, samples of a batch out; scores in, the bytes of an answer out.
//!
//! - `json` (named slots), `elasticctr`, `paddle` and `tensors` (Open Inference Protocol) decode requests of clients;
//!   `parsed` decodes samples from reader processes; lines of the training format are decoded in this file;
//! - `instances` is the JSON outline that `json` and `elasticctr` share; `values` converts values to inputs of the model for
//!   all codecs;
//! - `plain` encodes predictions by label; the other codecs encode their own answers.

use bytes::Bytes;
use elasticrec_sample::reader::parse_text_into;
use elasticrec_sample::{BatchBuilder, LabelMode, Parser};
use thiserror::Error;

use self::elasticctr::ElasticCtr;
use self::json::NamedSlots;

pub(crate) mod elasticctr;
mod instances;
mod json;
pub(crate) mod paddle;
pub(crate) mod parsed;
mod plain;
pub(crate) mod tensors;
pub(crate) mod values;

/// The form of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// `application/json`: `{"instances": [{"name": value, …}, …]}`.
    Json,
    /// `text/plain`: lines of the training format.
    Text,
    /// ElasticCTR's `{"instances": [{"slots": [{"slot_name": …, "feasigns": […]}, …]}, …]}`.
    ElasticCtr,
    /// A request of Paddle Serving's `GeneralModelService`.
    Paddle(paddle::Encoding),
    /// Samples that a reader process has parsed; never sent by clients.
    Parsed,
    /// Tensors of the Open Inference Protocol over HTTP: JSON followed by binary data.
    TensorsJson {
        /// Length of the JSON; None if there is no binary data.
        json_bytes: Option<usize>,
    },
    /// Tensors of the Open Inference Protocol over gRPC: a `ModelInferRequest`.
    TensorsProto,
}

/// The form of an answer, known once the request is decoded.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerFormat {
    /// Predictions by label, in JSON.
    Plain,
    /// Probabilities of the first label, in JSON.
    ElasticCtr,
    /// A tensor for each label.
    Paddle(paddle::Fetch),
    /// Tensors of scores over HTTP.
    TensorsJson(tensors::RequestedOutputs),
    /// Tensors of scores in a `ModelInferResponse`.
    TensorsProto(tensors::RequestedOutputs),
}

/// An encoded answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Reply {
    pub(crate) body: Bytes,
    /// Length of the JSON, if binary data follows it.
    pub(crate) json_bytes: Option<usize>,
}

/// The details of a version that its answers contain.
#[derive(Debug)]
pub(crate) struct VersionInfo {
    /// The name of the model in requests.
    pub(crate) model: String,
    /// Empty if the model has one variant.
    pub(crate) variant: String,
    pub(crate) version: u64,
    version_text: String,
    pub(crate) labels: Vec<String>,
    plain: plain::Template,
}

impl VersionInfo {
    pub(crate) fn new(model: &str, variant: &str, version: u64, labels: &[String]) -> VersionInfo {
        let plain = plain::Template::new(model, variant, version, labels);
        let version_text = version.to_string();
        VersionInfo {
            model: model.into(),
            variant: variant.into(),
            version,
            version_text,
            labels: labels.into(),
            plain,
        }
    }
}

/// Limits on a body.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of instances or lines in a request.
    pub max_instances: usize,
}

/// The reason a body is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The body is invalid.
    #[error("{0}")]
    Bad(String),
    /// The body has more instances than the limit.
    #[error("expected at most {max} {what} in a request, got more")]
    TooMany {
        /// Instances or lines.
        what: &'static str,
        /// The limit.
        max: usize,
    },
}

impl Codec {
    /// Adds the samples of `body` to a batch, all or none, and returns the form of the answer.
    pub fn decode(
        self,
        parser: &Parser,
        body: &[u8],
        limits: Limits,
        into: &mut BatchBuilder,
    ) -> Result<AnswerFormat, DecodeError> {
        let before = into.num_samples();
        let decoded = match self {
            Codec::Json => instances::decode::<NamedSlots>(parser, body, limits, into).map(|()| AnswerFormat::Plain),
            Codec::Text => decode_text(parser, body, limits, into).map(|()| AnswerFormat::Plain),
            Codec::ElasticCtr => {
                instances::decode::<ElasticCtr>(parser, body, limits, into).map(|()| AnswerFormat::ElasticCtr)
            }
            Codec::Paddle(encoding) => paddle::decode(encoding, parser, body, limits, into).map(AnswerFormat::Paddle),
            Codec::Parsed => parsed::decode(parser, body, limits, into).map(|()| AnswerFormat::Plain),
            Codec::TensorsJson { json_bytes } => {
                tensors::json::decode(parser, body, json_bytes, limits, into).map(AnswerFormat::TensorsJson)
            }
            Codec::TensorsProto => tensors::proto::decode(parser, body, limits, into).map(AnswerFormat::TensorsProto),
        };
        if decoded.is_err() {
            into.truncate(before);
        }
        decoded
    }
}

impl AnswerFormat {
    /// Refuses outputs that a version does not have.
    pub(crate) fn check(&self, info: &VersionInfo) -> Result<(), DecodeError> {
        match self {
            AnswerFormat::Plain | AnswerFormat::ElasticCtr => Ok(()),
            AnswerFormat::Paddle(fetch) => fetch.check(info),
            AnswerFormat::TensorsJson(wanted) | AnswerFormat::TensorsProto(wanted) => wanted.check(&info.labels),
        }
    }

    /// Encodes the scores `[samples, labels]` of a request.
    pub(crate) fn write(&self, info: &VersionInfo, scores: &[f32]) -> Result<Reply, String> {
        let body = match self {
            AnswerFormat::Plain => info.plain.write(scores).map_err(|error| error.to_string())?.into(),
            AnswerFormat::ElasticCtr => {
                elasticctr::write(info.labels.len(), scores).map_err(|error| error.to_string())?.into()
            }
            AnswerFormat::Paddle(fetch) => fetch.write(info, scores)?,
            AnswerFormat::TensorsJson(wanted) => return tensors::json::write(wanted, info, scores),
            AnswerFormat::TensorsProto(wanted) => return Ok(tensors::proto::write(wanted, info, scores)),
        };
        Ok(Reply { body, json_bytes: None })
    }
}

fn decode_text(parser: &Parser, body: &[u8], limits: Limits, into: &mut BatchBuilder) -> Result<(), DecodeError> {
    count_lines(body, limits)?;
    parse_text_into(parser, body, LabelMode::Ignored, into).map_err(DecodeError::Bad)
}

/// Returns the number of lines, or refuses more than the limit.
pub(crate) fn count_lines(body: &[u8], limits: Limits) -> Result<usize, DecodeError> {
    let last_is_open = body.last().is_some_and(|&byte| byte != b'\n');
    let num_lines = memchr::memchr_iter(b'\n', body).count() + usize::from(last_is_open);
    if num_lines > limits.max_instances {
        return Err(DecodeError::TooMany { what: "lines", max: limits.max_instances });
    }
    Ok(num_lines)
}

/// Decodes any bytes with every codec and both formats, for the fuzzer.
#[doc(hidden)]
pub fn fuzz_body(bytes: &[u8]) {
    const MAX_INSTANCES: usize = 5;
    let info = VersionInfo::new("demo", "", 1, &["click".into()]);
    for parser in json::fuzz_parsers() {
        // All codecs add to the same batch, like requests that are joined.
        let mut builder = parser.builder(0);
        let tensors = Codec::TensorsJson { json_bytes: None };
        // The first byte is the length of the JSON.
        let head = Codec::TensorsJson { json_bytes: bytes.first().map(|&length| length.into()) };
        let [proto, json] = [paddle::Encoding::Proto, paddle::Encoding::Json].map(Codec::Paddle);
        let codecs = [
            Codec::Json,
            Codec::Text,
            Codec::Parsed,
            Codec::ElasticCtr,
            proto,
            json,
            tensors,
            head,
            Codec::TensorsProto,
            tensors,
        ];
        for codec in codecs {
            let before = builder.num_samples();
            let decoded = codec.decode(&parser, bytes, Limits { max_instances: MAX_INSTANCES }, &mut builder);
            assert!(builder.batch().is_consistent());
            assert!(builder.batch().dense.iter().all(|value| value.is_finite()));
            match decoded {
                Ok(wanted) => {
                    assert!(builder.num_samples() - before <= MAX_INSTANCES);
                    let scores = vec![0.5; (builder.num_samples() - before) * info.labels.len()];
                    assert!(wanted.check(&info).is_err() || wanted.write(&info, &scores).is_ok());
                }
                Err(error) => {
                    assert_eq!(builder.num_samples(), before);
                    let line = error.to_string();
                    assert!(!line.is_empty() && line.len() < 1000 && !line.contains('\n'), "{line}");
                }
            }
        }
    }
}
