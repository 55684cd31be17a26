//! Criteo rows: label, 13 numbers `I1`–`I13`, 26 categories `C1`–`C26`, tab separated, empty = missing.

use crate::batch::BatchBuilder;
use crate::features::{Features, FeaturesError};
use crate::parser::{LabelMode, Parser, RecordError, excerpt};

const NUM_DENSE: usize = 13;
const NUM_SLOTS: usize = 26;
const NUM_FIELDS: usize = 1 + NUM_DENSE + NUM_SLOTS;

/// The input of the model for each column of a row.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    dense: [Option<usize>; NUM_DENSE],
    slots: [Option<u16>; NUM_SLOTS],
}

impl Columns {
    pub(crate) fn new(features: &Features) -> Result<Self, FeaturesError> {
        let mut columns = Columns::default();
        for (index, dense) in features.dense.iter().enumerate() {
            columns.dense[column("dense", "I", NUM_DENSE, &dense.name)?] = Some(index);
        }
        for (index, slot) in features.read_slots().iter().enumerate() {
            columns.slots[column("slots", "C", NUM_SLOTS, &slot.name)?] = Some(index as u16);
        }
        Ok(columns)
    }
}

fn column(what: &str, prefix: &str, count: usize, name: &str) -> Result<usize, FeaturesError> {
    (0..count).find(|column| name == format!("{prefix}{}", column + 1)).ok_or_else(|| {
        FeaturesError::Invalid(format!("{what}: expected `{prefix}1` to `{prefix}{count}` for criteo, got `{name}`"))
    })
}

/// Parses a row into the current sample of `into`; returns (show, click).
#[inline]
pub(crate) fn parse(
    parser: &Parser,
    columns: &Columns,
    line: &[u8],
    mode: LabelMode,
    into: &mut BatchBuilder,
) -> Result<(u32, u32), RecordError> {
    let num_fields = memchr::memchr_iter(b'\t', line).count() + 1;
    let has_label = num_fields == NUM_FIELDS;
    // Criteo's published test set has no label column.
    let is_unlabelled = mode == LabelMode::Ignored && num_fields == NUM_FIELDS - 1;
    if !has_label && !is_unlabelled {
        return Err(RecordError(format!("expected {NUM_FIELDS} tab-separated fields, got {num_fields}")));
    }
    let mut fields = line.split(|&byte| byte == b'\t');
    let label = if has_label { fields.next().unwrap_or_default() } else { b"" };
    let click = match (mode, label) {
        (LabelMode::Ignored, _) | (LabelMode::Required, b"0") => 0,
        (LabelMode::Required, b"1") => 1,
        (LabelMode::Required, _) => {
            return Err(RecordError(format!("label: expected 0 or 1, got `{}`", excerpt(label))));
        }
    };
    into.set_label(0, click as f32);
    for (column, field) in columns.dense.iter().zip(fields.by_ref()) {
        if let &Some(index) = column
            && !field.is_empty()
        {
            parser.set_dense(index, number(parser, index, field)?, into)?;
        }
    }
    for (column, field) in columns.slots.iter().zip(fields) {
        if let &Some(slot) = column
            && !field.is_empty()
        {
            parser.add_value(slot, field, into);
        }
    }
    Ok((1, click))
}

#[inline]
fn number(parser: &Parser, index: usize, field: &[u8]) -> Result<f32, RecordError> {
    let (negative, digits) = match field {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    // Fast path: nearly all values are integers of up to 9 digits, and an i32 converts to the f32 that parse() gives.
    if (1..=9).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit) {
        let value = digits.iter().fold(0i32, |value, digit| value * 10 + i32::from(digit - b'0'));
        return Ok(if negative { -value as f32 } else { value as f32 });
    }
    std::str::from_utf8(field).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
        RecordError(format!(
            "dense `{}`: expected a number, got `{}`",
            parser.features().dense[index].name,
            excerpt(field)
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{sign_of, slot_seed};

    fn parser() -> Parser {
        let features = r#"{"format":"criteo","hash":1,
            "slots":[{"name":"C26","pooling":"sum"},{"name":"C1","pooling":"sum"}],
            "dense":[{"name":"I2","normalize":{"kind":"none"}},{"name":"I13","normalize":{"kind":"log"}}],
            "labels":["click"]}"#;
        Parser::new(Features::from_json(features).unwrap()).unwrap()
    }

    fn row(label: &str, numbers: [&str; 13], first: &str, last: &str) -> String {
        let mut fields = vec![label.to_string()];
        fields.extend(numbers.map(String::from));
        fields.push(first.into());
        fields.extend(std::iter::repeat_n("ab".to_string(), 24));
        fields.push(last.into());
        fields.join("\t")
    }

    #[test]
    fn columns_are_in_the_order_of_the_job() {
        let parser = parser();
        let mut builder = parser.builder(2);
        let mut numbers = [""; 13];
        (numbers[1], numbers[12]) = ("-3", "1.5");
        for line in [row("1", numbers, "68fd1e64", ""), row("0", [""; 13], "", "x")] {
            parser.parse_line(line.as_bytes(), LabelMode::Required, &mut builder).unwrap();
        }
        let batch = builder.finish();
        assert_eq!(batch.signs, [sign_of(slot_seed("C1"), b"68fd1e64"), sign_of(slot_seed("C26"), b"x")]);
        assert_eq!(batch.offsets, [0, 0, 1, 2, 2]);
        assert_eq!(batch.dense, [-3.0, 2.5f32.ln(), 0.0, 0.0]);
        assert_eq!(batch.labels, [1.0, 0.0]);
    }

    #[test]
    fn bad_rows_are_errors() {
        let parser = parser();
        let error = |line: &str, mode| {
            parser.parse_line(line.as_bytes(), mode, &mut parser.builder(1)).unwrap_err().to_string()
        };
        let with = |value| {
            let mut numbers = [""; 13];
            numbers[1] = value;
            row("0", numbers, "a", "b")
        };
        assert_eq!(error("1\t2", LabelMode::Required), "expected 40 tab-separated fields, got 2");
        assert_eq!(error(&row("", [""; 13], "a", "b"), LabelMode::Required), "label: expected 0 or 1, got ``");
        assert_eq!(error(&with("1x"), LabelMode::Ignored), "dense `I2`: expected a number, got `1x`");
        assert_eq!(error(&with("NaN"), LabelMode::Required), "dense `I2`: expected a finite number, got NaN");
        assert_eq!(error(&with("1e39"), LabelMode::Required), "dense `I2`: expected a finite number, got inf");
    }

    #[test]
    fn a_row_without_label_can_be_predicted() {
        let parser = parser();
        let labelled = row("0", [""; 13], "a", "b");
        let (_, unlabelled) = labelled.split_once('\t').unwrap();
        let mut builder = parser.builder(1);
        parser.parse_line(unlabelled.as_bytes(), LabelMode::Ignored, &mut builder).unwrap();
        assert_eq!(builder.finish().signs.len(), 2);
        assert!(parser.parse_line(unlabelled.as_bytes(), LabelMode::Required, &mut parser.builder(1)).is_err());
    }

    #[test]
    fn unknown_columns_are_rejected() {
        let features = parser().features().clone();
        let mut wrong = features.clone();
        wrong.slots[0].name = "C27".into();
        assert!(Parser::new(wrong).unwrap_err().to_string().contains("expected `C1` to `C26` for criteo, got `C27`"));
    }
}
