//! PaddleRec slot text: `click:0 dense_feature:0.05 … 1:737395 2:210498 …`, separated by spaces or tabs.
//!
//! A repeated dense name gives the columns `name.0`, `name.1` and so on, in the order of the line.

use std::collections::HashMap;
use std::ops::Range;

use crate::batch::BatchBuilder;
use crate::features::{Features, FeaturesError};
use crate::parser::{LabelMode, Parser, RecordError, check_first, check_labels, excerpt, parse_f32, parse_label};

/// Labels and dense columns by name.
#[derive(Debug)]
pub(crate) struct Names {
    targets: HashMap<Box<[u8]>, Target>,
}

#[derive(Debug, Clone, Copy)]
enum Target {
    Label(usize),
    /// `count` columns from `first` on, one for each occurrence of the name in a line.
    Dense {
        first: usize,
        count: usize,
    },
}

impl Names {
    pub(crate) fn new(features: &Features) -> Result<Self, FeaturesError> {
        let mut targets: HashMap<Box<[u8]>, Target> = HashMap::new();
        for (index, dense) in features.dense.iter().enumerate() {
            let (name, occurrence) = match dense.name.rsplit_once('.') {
                Some((name, occurrence)) => (name, occurrence.parse().ok()),
                None => (dense.name.as_str(), Some(0)),
            };
            let known = targets.entry(name.as_bytes().into()).or_insert(Target::Dense { first: index, count: 0 });
            match known {
                Target::Dense { first, count } if occurrence == Some(*count) && index == *first + *count => *count += 1,
                _ => {
                    let message = format!("dense: expected `{name}.0`, `{name}.1` … in order, got `{}`", dense.name);
                    return Err(FeaturesError::Invalid(message));
                }
            }
        }
        for (index, label) in features.labels.iter().enumerate() {
            if targets.insert(label.as_bytes().into(), Target::Label(index)).is_some() {
                return Err(FeaturesError::Invalid(format!("labels: `{label}` is also a dense column")));
            }
        }
        Ok(Names { targets })
    }
}

/// The meaning of a name in a line.
#[derive(Debug, Clone, Copy)]
enum Meaning {
    Slot(u16),
    Other(Target),
    Unused,
}

impl Names {
    #[inline]
    fn meaning(&self, parser: &Parser, name: &[u8]) -> Meaning {
        match parser.slot(name) {
            Some(slot) => Meaning::Slot(slot),
            None => self.targets.get(name).map_or(Meaning::Unused, |&target| Meaning::Other(target)),
        }
    }
}

/// Parses a line into the current sample of `into`; returns (show, click).
#[inline]
pub(crate) fn parse(
    parser: &Parser,
    names: &Names,
    line: &[u8],
    mode: LabelMode,
    into: &mut BatchBuilder,
) -> Result<(u32, u32), RecordError> {
    let mut sample = Sample { parser, mode, click: 0, into };
    let mut last = (&b""[..], Meaning::Unused);
    let mut add = |field: Range<usize>, colon: Option<usize>| -> Result<(), RecordError> {
        let field = &line[field];
        let Some(colon) = colon else {
            return Err(RecordError(format!("expected `slot:value`, got `{}`", excerpt(field))));
        };
        let (name, value) = (&field[..colon], &field[colon + 1..]);
        if value.is_empty() {
            return Err(RecordError(format!(
                "slot `{}`: expected a value after the colon, got nothing",
                excerpt(name)
            )));
        }
        // Dense names repeat many times in a row: look them up once.
        if name != last.0 {
            last = (name, names.meaning(parser, name));
        }
        sample.add(name, value, last.1)
    };
    let (mut start, mut colon) = (0, None);
    for end in memchr::memchr3_iter(b':', b' ', b'\t', line).chain([line.len()]) {
        if line.get(end) == Some(&b':') {
            colon = colon.or(Some(end - start));
            continue;
        }
        if end > start {
            add(start..end, colon)?;
        }
        (start, colon) = (end + 1, None);
    }
    let click = sample.click;
    if mode == LabelMode::Required {
        check_labels(&parser.features().labels, into)?;
    }
    Ok((1, click))
}

struct Sample<'a> {
    parser: &'a Parser,
    mode: LabelMode,
    click: u32,
    into: &'a mut BatchBuilder,
}

impl Sample<'_> {
    #[inline]
    fn add(&mut self, name: &[u8], value: &[u8], meaning: Meaning) -> Result<(), RecordError> {
        match meaning {
            Meaning::Slot(slot) => self.parser.add_value(slot, value, self.into),
            Meaning::Unused => {}
            Meaning::Other(Target::Dense { first, count }) => {
                let occurrence = self.into.next_dense(first);
                if occurrence >= count {
                    let name = excerpt(name);
                    return Err(RecordError(format!("dense `{name}`: expected at most {count} values, got more")));
                }
                let Some(number) = parse_f32(value) else {
                    let (name, value) = (excerpt(name), excerpt(value));
                    return Err(RecordError(format!("dense `{name}`: expected a number, got `{value}`")));
                };
                self.parser.set_dense(first + occurrence, number, self.into)?;
            }
            Meaning::Other(Target::Label(_)) if self.mode == LabelMode::Ignored => {}
            Meaning::Other(Target::Label(index)) => {
                let name = &self.parser.features().labels[index];
                check_first(name, index, self.into)?;
                let label = parse_label(name, value)?;
                self.into.set_label(index, label);
                self.click = if index == 0 { u32::from(label >= 0.5) } else { self.click };
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{sign_of, slot_seed};

    fn parser(rest: &str) -> Parser {
        let features = format!(
            r#"{{"format":"paddlerec","hash":1,
            "slots":[{{"name":"1","pooling":"sum"}},{{"name":"2","pooling":"sum"}},{{"name":"2x","pooling":"sum","share":"2"}}],
            "dense":[{{"name":"dense_feature.0","normalize":{{"kind":"none"}}}},
                     {{"name":"dense_feature.1","normalize":{{"kind":"log"}}}}],
            "labels":["click"]{rest}}}"#
        );
        Parser::new(Features::from_json(&features).unwrap()).unwrap()
    }

    fn parse_one(parser: &Parser, line: &str, mode: LabelMode) -> Result<crate::Batch, RecordError> {
        let mut builder = parser.builder(1);
        parser.parse_line(line.as_bytes(), mode, &mut builder)?;
        Ok(builder.finish())
    }

    #[test]
    fn a_line_of_paddlerec() {
        let line = "click:1 dense_feature:0.05 dense_feature:-1 1:737395 2:9 9:4 2:10 2x:9";
        let batch = parse_one(&parser(""), line, LabelMode::Required).unwrap();
        let sign = |slot, value: &str| sign_of(slot_seed(slot), value.as_bytes());
        assert_eq!(batch.signs, [sign("1", "737395"), sign("2", "9"), sign("2", "10"), sign("2", "9")]);
        assert_eq!(batch.offsets, [0, 1, 3, 4]);
        assert_eq!(batch.dense, [0.05, -(2f32.ln())]);
        assert_eq!((batch.labels, batch.clicks, batch.shows), (vec![1.0], vec![1], vec![1]));
    }

    #[test]
    fn padding_and_modulo() {
        let parser = parser(r#","modulo":1000,"padding":"0""#);
        let batch = parse_one(&parser, "click:0 1:0 2:5", LabelMode::Required).unwrap();
        assert_eq!(batch.signs, [sign_of(slot_seed("2"), b"5") % 1000]);
        assert_eq!(batch.offsets, [0, 0, 1, 1]);
    }

    #[test]
    fn bad_lines_are_errors() {
        let parser = parser("");
        let error = |line| parse_one(&parser, line, LabelMode::Required).unwrap_err().to_string();
        assert_eq!(error("click:0 7"), "expected `slot:value`, got `7`");
        assert_eq!(error("click:2 1:7"), "label `click`: expected a number from 0 to 1, got `2`");
        assert_eq!(error("1:7"), "label `click`: expected one value, got none");
        assert_eq!(error("click:0 1:"), "slot `1`: expected a value after the colon, got nothing");
        assert_eq!(error("click:0 dense_feature:x"), "dense `dense_feature`: expected a number, got `x`");
        assert_eq!(error("click:0 dense_feature:nan"), "dense `dense_feature.0`: expected a finite number, got NaN");
        let three = "click:0 dense_feature:1 dense_feature:1 dense_feature:1";
        assert_eq!(error(three), "dense `dense_feature`: expected at most 2 values, got more");
        assert!(parse_one(&parser, "1:7", LabelMode::Ignored).is_ok());
    }

    #[test]
    fn a_line_has_each_label_exactly_once() {
        let json = r#"{"format":"paddlerec","hash":1,"slots":[{"name":"1","pooling":"sum"}],"dense":[],
            "labels":["click","buy"]}"#;
        let parser = Parser::new(Features::from_json(json).unwrap()).unwrap();
        let error = |line| parse_one(&parser, line, LabelMode::Required).unwrap_err().to_string();
        assert_eq!(error("click:0 click:1 1:7"), "label `click`: expected one value, got two");
        assert_eq!(error("click:0 buy:1 1:7 buy:1"), "label `buy`: expected one value, got two");
        assert_eq!(error("click:0 1:7"), "label `buy`: expected one value, got none");
        assert_eq!(error("buy:0 1:7"), "label `click`: expected one value, got none");
        assert_eq!(parse_one(&parser, "buy:0 1:7 click:1", LabelMode::Required).unwrap().labels, [1.0, 0.0]);
        assert!(parse_one(&parser, "click:0 click:1 1:7", LabelMode::Ignored).is_ok());
    }
}
