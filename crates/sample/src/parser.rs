//! The parser: a line of any format, or named values, into a sample of a batch.

use std::collections::HashMap;
use std::sync::OnceLock;

use thiserror::Error;

use crate::batch::BatchBuilder;
use crate::features::{Buckets, Features, Format};
use crate::pool::Layout;
use crate::{criteo, csv, hash, paddlerec, slots};

/// Whether a line must have labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabelMode {
    /// Training and evaluation: a line without labels is bad.
    Required,
    /// Prediction: the label fields are ignored.
    Ignored,
}

/// A bad record; callers add the file and the line.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct RecordError(pub String);

/// A parser for one declaration of features.
#[derive(Debug)]
pub struct Parser {
    features: Features,
    /// Slots with numeric names such as `17`, the common case.
    numeric: Vec<u16>,
    named: HashMap<Box<[u8]>, u16>,
    /// Hash seeds of the slots.
    seeds: Vec<u64>,
    layout: Layout,
    /// Number of signs that are kept in each slot; empty without sequences.
    longest: Vec<usize>,
    /// Whether signs of slot text are row keys unchanged.
    plain: bool,
    padding_sign: Option<u64>,
    missing: f32,
    /// Slot and steps of the buckets of each dense column; empty if no column has buckets.
    buckets: Vec<Option<(u16, u16)>>,
    columns: Columns,
}

/// The meaning of the fields of a line, for formats with named or numbered fields.
#[derive(Debug)]
enum Columns {
    None,
    PaddleRec(paddlerec::Names),
    Criteo(Box<criteo::Columns>),
    Csv(csv::Fields),
}

/// Marks a number that is not the name of a slot of the job.
const UNUSED: u16 = u16::MAX;
/// Numeric names below this are in `Parser::numeric`.
pub(crate) const NUMERIC_SLOTS: usize = 65_536;

impl Parser {
    /// Creates the parser for `features`.
    pub fn new(features: Features) -> Result<Self, crate::FeaturesError> {
        let mut numeric = Vec::new();
        let mut named = HashMap::new();
        // A slot is found by its name and by the name of its column, which takes precedence.
        let read = features.read_slots();
        let names = read.iter().map(|slot| slot.name.as_str()).zip(0u16..);
        let columns = read.iter().map(crate::features::Slot::column).zip(0u16..);
        for (name, index) in names.chain(columns) {
            named.insert(name.as_bytes().into(), index);
            if let Some(number) = canonical_number(name.as_bytes()) {
                if numeric.len() <= number {
                    numeric.resize(number + 1, UNUSED);
                }
                numeric[number] = index;
            }
        }
        let columns = match features.format {
            Format::PaddleRec => Columns::PaddleRec(paddlerec::Names::new(&features)?),
            Format::Criteo => Columns::Criteo(Box::new(criteo::Columns::new(&features)?)),
            Format::Csv => Columns::Csv(csv::Fields::new(&features)?),
            Format::Slots | Format::Parquet | Format::Reader => Columns::None,
        };
        // Slots that share rows have the same seed.
        let seed = |slot: &crate::features::Slot| hash::slot_seed(slot.share.as_ref().unwrap_or(&slot.name));
        let has_sequence = features.slots.iter().any(|slot| slot.sequence.is_some());
        let longest = |slot: &crate::features::Slot| slot.sequence.map_or(usize::MAX, usize::from);
        Ok(Parser {
            seeds: features.slots.iter().map(seed).collect(),
            layout: Layout::of(&features),
            longest: if has_sequence { features.slots.iter().map(longest).collect() } else { Vec::new() },
            plain: !features.separate_slots && features.modulo.is_none() && features.padding.is_none(),
            padding_sign: features.padding.as_ref().and_then(|padding| parse_u64(padding.as_bytes())),
            missing: 0.0,
            buckets: buckets_of(&features),
            features,
            numeric,
            named,
            columns,
        })
    }

    /// Uses `missing` for missing dense values; models read them as 0, the default.
    pub fn with_missing(mut self, missing: f32) -> Self {
        self.missing = missing;
        self
    }

    /// The value for missing dense values.
    pub fn missing(&self) -> f32 {
        self.missing
    }

    /// The declaration.
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// The cells of each slot.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns an empty batch for the samples of this parser.
    pub fn builder(&self, capacity: usize) -> BatchBuilder {
        let Features { slots, dense, labels, .. } = &self.features;
        BatchBuilder::new(slots.len(), dense.len(), labels.len(), capacity)
            .with_longest(&self.longest)
            .with_missing(self.missing)
    }

    /// Parses one line without its line end; a bad line adds nothing to the batch.
    #[inline]
    pub fn parse_line(&self, line: &[u8], labels: LabelMode, into: &mut BatchBuilder) -> Result<(), RecordError> {
        into.begin();
        let (show, click) = match &self.columns {
            Columns::PaddleRec(names) => paddlerec::parse(self, names, line, labels, into)?,
            Columns::Criteo(columns) => criteo::parse(self, columns, line, labels, into)?,
            Columns::Csv(fields) => {
                let (show, click, weight) = csv::parse(self, fields, line, labels, into)?;
                into.end_weighted(show, click, weight);
                return Ok(());
            }
            Columns::None => match self.features.format {
                Format::Parquet => return Err(RecordError("expected named values for parquet, got a line".into())),
                Format::Reader => {
                    return Err(RecordError("expected named values from the job's reader, got a line".into()));
                }
                _ => slots::parse(self, line, labels, into)?,
            },
        };
        into.end(show, click);
        Ok(())
    }

    /// Whether a line is a record: not blank, and not the header of a CSV file.
    pub fn is_record(&self, line: &[u8]) -> bool {
        if line.iter().all(|&byte| byte == b' ' || byte == b'\t') {
            // A CSV line of tabs has empty fields: it is a bad record, not a blank line.
            return matches!(self.columns, Columns::Csv(_)) && line.contains(&b'\t');
        }
        match &self.columns {
            Columns::Csv(fields) => !fields.is_header(line),
            _ => true,
        }
    }

    /// Returns the time of a line in seconds since 1970, for formats with a time column.
    pub fn time_of(&self, line: &[u8]) -> Option<f64> {
        match &self.columns {
            Columns::Csv(fields) => fields.time_of(line),
            _ => None,
        }
    }

    /// Returns the number of the slot called `name`, if the job uses it.
    #[inline]
    pub fn slot(&self, name: &[u8]) -> Option<u16> {
        match canonical_number(name) {
            Some(number) => self.numbered_slot(number),
            None => self.named.get(name).copied(),
        }
    }

    /// Returns the number of the slot with a numeric name such as `17`.
    #[inline]
    pub(crate) fn numbered_slot(&self, number: usize) -> Option<u16> {
        self.numeric.get(number).copied().filter(|&slot| slot != UNUSED)
    }

    /// Returns the number of the dense column called `name`.
    pub fn dense(&self, name: &str) -> Option<usize> {
        self.features.dense.iter().position(|dense| dense.name == name)
    }

    /// Returns the row key of a categorical value, for formats whose signs are hashes.
    #[inline]
    pub fn sign(&self, slot: u16, value: &[u8]) -> u64 {
        self.wrap(hash::sign_of(self.seeds[usize::from(slot)], value))
    }

    /// Adds a categorical value to the sample, unless it is the padding.
    #[inline]
    pub fn add_value(&self, slot: u16, value: &[u8], into: &mut BatchBuilder) {
        if self.features.padding.as_ref().is_none_or(|padding| padding.as_bytes() != value) {
            into.add_sign(slot, self.sign(slot, value));
        }
    }

    /// Adds a sign of slot text to the sample, unless it is the padding.
    #[inline]
    pub fn add_sign(&self, slot: u16, sign: u64, into: &mut BatchBuilder) {
        if self.plain {
            into.add_sign(slot, sign);
        } else if let Some(key) = self.key_of_text(slot, sign) {
            into.add_sign(slot, key);
        }
    }

    /// Returns the row key of a sign of slot text, or `None` for the padding.
    #[inline]
    fn key_of_text(&self, slot: u16, sign: u64) -> Option<u64> {
        if self.padding_sign == Some(sign) {
            return None;
        }
        Some(self.wrap(match self.features.separate_slots {
            true => hash::sign_of(self.seeds[usize::from(slot)], &sign.to_le_bytes()),
            false => sign,
        }))
    }

    /// Returns the row key of a sign, or `None` for the padding. In slot text the sign is the one in the data; in other
    /// formats it is a result of [`Self::sign`].
    #[inline]
    pub fn key(&self, slot: u16, sign: u64) -> Option<u64> {
        if self.features.format.has_signs() { self.key_of_text(slot, sign) } else { Some(self.wrap(sign)) }
    }

    /// Whether [`Self::key`] returns every sign unchanged.
    pub fn keeps_signs(&self) -> bool {
        self.plain || (!self.features.format.has_signs() && self.features.modulo.is_none())
    }

    /// Whether no sign is the padding: [`Self::key`] never returns `None`.
    pub fn has_no_padding_sign(&self) -> bool {
        self.padding_sign.is_none() || !self.features.format.has_signs()
    }

    #[inline]
    fn wrap(&self, sign: u64) -> u64 {
        self.features.modulo.map_or(sign, |modulo| sign % modulo)
    }

    /// Returns the number of the label called `name`.
    pub fn label(&self, name: &[u8]) -> Option<usize> {
        self.features.labels.iter().position(|label| label.as_bytes() == name)
    }

    /// Sets a dense value of the sample, and adds the sign of its bucket if the job has buckets for it.
    #[inline]
    pub fn set_dense(&self, index: usize, value: f32, into: &mut BatchBuilder) -> Result<(), RecordError> {
        let normalized = self.normalize(index, value)?;
        into.set_dense(index, normalized);
        if let Some((slot, sign)) = self.bucket(index, normalized) {
            into.add_bucket(slot, sign);
        }
        Ok(())
    }

    /// Returns the bucket slot of dense column `index`, if the job has one.
    pub fn bucket_slot(&self, index: usize) -> Option<u16> {
        self.buckets.get(index).copied().flatten().map(|(slot, _)| slot)
    }

    /// Returns the bucket slot and the sign of the bucket of a normalised value of dense column `index`.
    #[inline]
    pub fn bucket(&self, index: usize, normalized: f32) -> Option<(u16, u64)> {
        let &(slot, steps) = self.buckets.get(index)?.as_ref()?;
        Some((slot, self.sign(slot, &Buckets::of(steps, normalized).to_le_bytes())))
    }

    /// Returns the model's input for a value of dense column `index`; non-finite values are errors.
    #[inline]
    pub fn normalize(&self, index: usize, value: f32) -> Result<f32, RecordError> {
        let dense = &self.features.dense[index];
        let normalized = dense.normalize.apply(value);
        if value.is_finite() && normalized.is_finite() {
            return Ok(normalized);
        }
        Err(RecordError(format!("dense `{}`: expected a finite number, got {value}", dense.name)))
    }
}

fn buckets_of(features: &Features) -> Vec<Option<(u16, u16)>> {
    let bucketed = || features.slots.iter().zip(0u16..).filter_map(|(slot, at)| Some((slot.buckets.as_ref()?, at)));
    if bucketed().next().is_none() {
        return Vec::new();
    }
    let slot_of = |name| bucketed().find(|(buckets, _)| buckets.dense == name).map(|(buckets, at)| (at, buckets.steps));
    features.dense.iter().map(|dense| slot_of(dense.name.as_str())).collect()
}

/// Returns the number of a numeric name such as `17`; `017` and `+17` are not numeric.
#[inline]
fn canonical_number(name: &[u8]) -> Option<usize> {
    if name.is_empty() || name.len() > 5 || (name[0] == b'0' && name.len() > 1) {
        return None;
    }
    let mut number = 0;
    for &byte in name {
        if !byte.is_ascii_digit() {
            return None;
        }
        number = number * 10 + usize::from(byte - b'0');
    }
    (number < NUMERIC_SLOTS).then_some(number)
}

/// Parses a decimal u64 without sign or spaces.
#[inline]
pub fn parse_u64(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 {
        return None;
    }
    let (head, tail) = text.split_at(text.len().min(19));
    let mut number: u64 = 0;
    for &byte in head {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        number = number * 10 + u64::from(digit);
    }
    match tail {
        [] => Some(number),
        [last] if last.is_ascii_digit() => number.checked_mul(10)?.checked_add(u64::from(last - b'0')),
        _ => None,
    }
}

/// Parses a number with optional spaces around it; it may be NaN or infinite.
pub(crate) fn parse_f32(text: &[u8]) -> Option<f32> {
    std::str::from_utf8(text).ok()?.trim_ascii().parse().ok()
}

/// Parses a label: a number from 0 to 1, `true` or `false`.
pub(crate) fn parse_label(name: &str, text: &[u8]) -> Result<f32, RecordError> {
    match text {
        b"0" | b"false" | b"False" => Ok(0.0),
        b"1" | b"true" | b"True" => Ok(1.0),
        _ => parse_f32(text).filter(|label| (0.0..=1.0).contains(label)).ok_or_else(|| {
            RecordError(format!("label `{name}`: expected a number from 0 to 1, got `{}`", excerpt(text)))
        }),
    }
}

/// Rejects a label that the sample already has.
#[inline]
pub(crate) fn check_first(name: &str, index: usize, into: &BatchBuilder) -> Result<(), RecordError> {
    match into.has_label(index) {
        true => Err(RecordError(format!("label `{name}`: expected one value, got two"))),
        false => Ok(()),
    }
}

/// Rejects a sample with a missing label.
#[inline]
pub(crate) fn check_labels(labels: &[String], into: &BatchBuilder) -> Result<(), RecordError> {
    match into.missing_label() {
        Some(index) => Err(RecordError(format!("label `{}`: expected one value, got none", labels[index]))),
        None => Ok(()),
    }
}

/// Returns the start of an input for a message, escaped: up to 40 characters.
pub fn excerpt(input: impl AsRef<[u8]>) -> String {
    excerpt_up_to(40, input)
}

/// Returns the first `max_chars` characters of an input for a message, escaped; `…` stands for the rest.
pub fn excerpt_up_to(max_chars: usize, input: impl AsRef<[u8]>) -> String {
    let text = String::from_utf8_lossy(input.as_ref());
    let mut chars = text.chars();
    let start: String = chars.by_ref().take(max_chars).collect();
    // Escaped as a whole: combining characters are printable after another character.
    let start = start.escape_debug().to_string();
    if chars.next().is_some() { start + "…" } else { start }
}

/// Fuzz target: parses any bytes as lines of every text format.
#[doc(hidden)]
pub fn fuzz_lines(bytes: &[u8]) {
    let slots = r#"{"format":"slots","hash":1,"slots":[{"name":"0","pooling":"sum"},{"name":"7","pooling":"mean"},
        {"name":"user","pooling":"sqrtn"}],"dense":[],"labels":["click","buy"]}"#;
    let criteo = r#"{"format":"criteo","hash":1,"slots":[{"name":"C1","pooling":"sum"},{"name":"C26","pooling":"sum"},
        {"name":"I1.bucket","pooling":"sum","buckets":{"dense":"I1","steps":6}}],"dense":[{"name":"I1","normalize":{"kind":"log"}}],"labels":["click"]}"#;
    let paddlerec = r#"{"format":"paddlerec","hash":1,"slots":[{"name":"1","pooling":"sum"},{"name":"user","pooling":"sum",
        "sequence":3}],"dense":[{"name":"d.0","normalize":{"kind":"log"}},{"name":"d.1","normalize":{"kind":"none"}}],
        "labels":["click","buy"],"modulo":1000001,"padding":"0"}"#;
    let csv = r#"{"format":"csv","hash":1,"slots":[{"name":"1","pooling":"sum","separator":"|"},
        {"name":"user","pooling":"sum","share":"1"}],"dense":[{"name":"d","normalize":{"kind":"log"}}],
        "labels":["click"],"columns":{"names":["click","1","user","d","w","t"],"header":true,"weight":"w","time":"t"}}"#;
    static PARSERS: OnceLock<[Parser; 4]> = OnceLock::new();
    let parsers = PARSERS.get_or_init(|| {
        [slots, criteo, paddlerec, csv].map(|json| match Features::from_json(json).and_then(Parser::new) {
            Ok(parser) => parser,
            Err(error) => unreachable!("the declarations above are valid: {error}"),
        })
    });
    for parser in parsers {
        for mode in [LabelMode::Required, LabelMode::Ignored] {
            let mut builder = parser.builder(0);
            let mut good = 0;
            for line in bytes.split(|&byte| byte == b'\n') {
                good += usize::from(parser.parse_line(line, mode, &mut builder).is_ok());
            }
            let batch = builder.finish();
            assert_eq!(batch.num_samples(), good);
            assert_eq!(batch.offsets.len(), good * batch.num_slots + 1);
            assert_eq!(batch.offsets.last().copied(), Some(batch.signs.len() as u32));
            assert!(batch.dense.iter().chain(&batch.labels).all(|value| value.is_finite()));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_decimal_u64_are_signs() {
        assert_eq!(parse_u64(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(parse_u64(b"0"), Some(0));
        for bad in
            ["", "-1", "+1", "18446744073709551616", "99999999999999999999", "1 ", "0x1", "100000000000000000000"]
        {
            assert_eq!(parse_u64(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn missing_dense_values_can_be_chosen() {
        let json = r#"{"format":"criteo","hash":1,"slots":[],"dense":[{"name":"I1","normalize":{"kind":"log"}},
            {"name":"I2","normalize":{"kind":"none"}}],"labels":["click"]}"#;
        let parser = Parser::new(Features::from_json(json).unwrap()).unwrap();
        let line = format!("0\t\t5{}", "\t".repeat(37));
        let dense = |parser: &Parser| {
            let mut builder = parser.builder(1);
            parser.parse_line(line.as_bytes(), LabelMode::Required, &mut builder).unwrap();
            builder.finish().dense
        };
        assert_eq!(dense(&parser), [0.0, 5.0]);
        let marked = dense(&parser.with_missing(f32::NAN));
        assert!(marked[0].is_nan() && marked[1] == 5.0);
    }

    #[test]
    fn the_bucket_of_a_dense_value_is_the_last_slot_in_every_format() {
        let json = |format: &str, more: &str| {
            format!(
                r#"{{"format":"{format}","hash":1,"slots":[{{"name":"C1","pooling":"sum"}},
                {{"name":"b","pooling":"sum","buckets":{{"dense":"I1","steps":6}}}}],
                "dense":[{{"name":"I1","normalize":{{"kind":"log"}}}}],"labels":["click"]{more}}}"#
            )
        };
        let batch = |json: String, line: &str| {
            let parser = Parser::new(Features::from_json(&json).unwrap()).unwrap();
            let mut builder = parser.builder(1);
            parser.parse_line(line.as_bytes(), LabelMode::Required, &mut builder).unwrap();
            builder.finish()
        };
        let names = r#","columns":{"names":["click","I1","C1"]}"#;
        // ln(1 + 7) · 6 = 12.5
        let expected =
            [hash::sign_of(hash::slot_seed("C1"), b"x"), hash::sign_of(hash::slot_seed("b"), &12i64.to_le_bytes())];
        let row = |number: &str| format!("1\t{number}{}x{}", "\t".repeat(13), "\t".repeat(25));
        for batch in [
            batch(json("criteo", ""), &row("7")),
            batch(json("csv", names), "1,7,x"),
            // The name of a bucket slot is unknown in the data.
            batch(json("paddlerec", ""), "click:1 I1:7 C1:x b:3"),
        ] {
            assert_eq!(batch.signs, expected);
            assert_eq!(batch.offsets, [0, 1, 2]);
        }
        let missing = batch(json("criteo", ""), &row(""));
        assert_eq!((missing.signs.len(), missing.offsets), (1, vec![0, 1, 1]));
        let small = batch(json("criteo", r#","modulo":1000"#), &row("7"));
        assert_eq!(small.signs, expected.map(|sign| sign % 1000));
    }

    #[test]
    fn a_bad_line_leaves_no_bucket_for_the_next() {
        let json = r#"{"format":"paddlerec","hash":1,"slots":[{"name":"1","pooling":"sum"},
            {"name":"d.bucket","pooling":"sum","buckets":{"dense":"d","steps":6}}],
            "dense":[{"name":"d","normalize":{"kind":"none"}}],"labels":["click"]}"#;
        let parser = Parser::new(Features::from_json(json).unwrap()).unwrap();
        let mut builder = parser.builder(1);
        assert!(parser.parse_line(b"click:1 d:0.5 1", LabelMode::Required, &mut builder).is_err());
        parser.parse_line(b"click:1 1:7", LabelMode::Required, &mut builder).unwrap();
        assert_eq!(builder.finish().offsets, [0, 1, 1]);
    }

    proptest! {
        #[test]
        fn u64_round_trip(number: u64) {
            prop_assert_eq!(parse_u64(number.to_string().as_bytes()), Some(number));
        }

        #[test]
        fn u64_agrees_with_the_standard_library(text in "[0-9+a]{0,22}") {
            let expected = if text.starts_with('+') { None } else { text.parse().ok() };
            prop_assert_eq!(parse_u64(text.as_bytes()), expected);
        }

        #[test]
        fn hostile_bytes_give_errors(bytes in prop::collection::vec(prop::sample::select(b"01 \t\n:=79a-.\xff".to_vec()), 0..400)) {
            fuzz_lines(&bytes);
        }
    }

    #[test]
    fn a_number_with_a_leading_zero_is_a_different_name() {
        let offsets = |names: &[&str], slot: &str| {
            let slots: Vec<String> =
                names.iter().map(|name| format!(r#"{{"name":"{name}","pooling":"sum"}}"#)).collect();
            let slots = slots.join(",");
            let json = format!(r#"{{"format":"slots","hash":1,"slots":[{slots}],"dense":[],"labels":["click"]}}"#);
            let parser = Parser::new(Features::from_json(&json).unwrap()).unwrap();
            let mut builder = parser.builder(1);
            let line = format!("1 0 5:{slot}");
            parser.parse_line(line.as_bytes(), LabelMode::Required, &mut builder).unwrap();
            builder.finish().offsets
        };
        assert_eq!(offsets(&["17"], "17"), [0, 1]);
        assert_eq!(offsets(&["17"], "017"), [0, 0]);
        assert_eq!(offsets(&["017"], "017"), [0, 1]);
        assert_eq!(offsets(&["017"], "17"), [0, 0]);
        for names in [["17", "017"], ["017", "17"]] {
            assert_eq!(offsets(&names, names[0]), [0, 1, 1]);
            assert_eq!(offsets(&names, names[1]), [0, 0, 1]);
        }
    }

    #[test]
    fn excerpts_are_short_and_printable() {
        assert_eq!(excerpt(b"a\x00b"), "a\\0b");
        assert_eq!(excerpt("x".repeat(40)), "x".repeat(40));
        assert_eq!(excerpt("x".repeat(1000)), "x".repeat(40) + "…");
        assert_eq!(excerpt("e\u{301}t\u{e9}"), "e\u{301}t\u{e9}");
        assert_eq!(excerpt_up_to(2, "用户组"), "用户…");
        assert_eq!(excerpt_up_to(3, "用户组"), "用户组");
        assert_eq!(excerpt_up_to(2, b"\xff\n"), "\u{fffd}\\n");
    }
}
