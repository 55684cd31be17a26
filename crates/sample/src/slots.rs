//! Slot text: `show click [name=value …] sign:slot sign:slot …`, fields separated by spaces or tabs.

use crate::batch::BatchBuilder;
use crate::parser::{LabelMode, Parser, RecordError, parse_u64, shown};

/// Parses a line into the sample begun in `into` and returns (show, click).
#[inline]
pub(crate) fn parse(
    parser: &Parser,
    line: &[u8],
    mode: LabelMode,
    into: &mut BatchBuilder,
) -> Result<(u32, u32), RecordError> {
    let mut fields = Fields { rest: line };
    let (show, click) = match mode {
        LabelMode::Required => parse_counts(&mut fields, into)?,
        LabelMode::Ignored => {
            if fields.next().is_none() || fields.next().is_none() {
                return Err(RecordError("expected `show click sign:slot …`, got fewer than 2 fields".into()));
            }
            (1, 0)
        }
    };
    let mut labels_seen = 1;
    for field in fields {
        let Some(colon) = memchr::memrchr(b':', field) else {
            labels_seen += usize::from(parse_label(parser, field, mode, show, into)?);
            continue;
        };
        let (sign, slot) = (&field[..colon], &field[colon + 1..]);
        let Some(sign) = parse_u64(sign) else {
            return Err(RecordError(format!("slot `{}`: sign `{}` is not a u64", shown(slot), shown(sign))));
        };
        if slot.is_empty() {
            return Err(RecordError(format!("sign `{sign}`: expected a slot after the colon, got nothing")));
        }
        if let Some(slot) = parser.slot(slot) {
            into.add_sign(slot, sign);
        }
    }
    let num_labels = parser.features().labels.len();
    if mode == LabelMode::Required && labels_seen != num_labels {
        return Err(RecordError(format!("expected {num_labels} labels, each once, got {labels_seen}")));
    }
    Ok((show, click))
}

fn parse_counts(fields: &mut Fields<'_>, into: &mut BatchBuilder) -> Result<(u32, u32), RecordError> {
    let mut count = |name: &str| {
        let field = fields.next().unwrap_or_default();
        parse_u64(field)
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| RecordError(format!("{name}: expected a count below 2^32, got `{}`", shown(field))))
    };
    let show = count("show")?;
    let click = count("click")?;
    if show == 0 {
        return Err(RecordError("show: expected at least 1, got 0".into()));
    }
    if click > show {
        return Err(RecordError(format!("click: expected at most show = {show}, got {click}")));
    }
    into.set_label(0, click as f32 / show as f32);
    Ok((show, click))
}

/// A `name=value` field; true if it is a label of the job.
fn parse_label(
    parser: &Parser,
    field: &[u8],
    mode: LabelMode,
    show: u32,
    into: &mut BatchBuilder,
) -> Result<bool, RecordError> {
    let Some(equals) = memchr::memchr(b'=', field) else {
        return Err(RecordError(format!("expected `sign:slot`, got `{}`", shown(field))));
    };
    let (name, value) = (&field[..equals], &field[equals + 1..]);
    let label = parser.features().labels.iter().skip(1).position(|label| label.as_bytes() == name);
    let (Some(label), LabelMode::Required) = (label, mode) else {
        return Ok(false);
    };
    match parse_u64(value) {
        Some(count) if count <= u64::from(show) => {
            into.set_label(label + 1, count as f32 / show as f32);
            Ok(true)
        }
        _ => Err(RecordError(format!(
            "label `{}`: expected a count of at most show = {show}, got `{}`",
            shown(name),
            shown(value)
        ))),
    }
}

/// The non-empty fields of a line.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Fields<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            if self.rest.is_empty() {
                return None;
            }
            let end = self.rest.iter().position(|&byte| byte == b' ' || byte == b'\t').unwrap_or(self.rest.len());
            let field = &self.rest[..end];
            self.rest = &self.rest[(end + 1).min(self.rest.len())..];
            if !field.is_empty() {
                return Some(field);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Features};

    fn parse_lines(labels: &str, mode: LabelMode, lines: &[&str]) -> Result<Batch, String> {
        let features = format!(
            r#"{{"format":"slots","hash":1,"slots":[{{"name":"0","pooling":"sum"}},{{"name":"7","pooling":"sum"}},
            {{"name":"user","pooling":"sum"}}],"dense":[],"labels":{labels}}}"#
        );
        let parser = Parser::new(Features::from_json(&features).unwrap()).unwrap();
        let mut builder = parser.builder(lines.len());
        for line in lines {
            parser.parse_line(line.as_bytes(), mode, &mut builder).map_err(|error| error.to_string())?;
        }
        Ok(builder.finish())
    }

    fn error_of(line: &str) -> String {
        parse_lines(r#"["click"]"#, LabelMode::Required, &[line]).unwrap_err()
    }

    #[test]
    fn signs_go_to_their_slots_and_other_slots_are_passed_over() {
        let lines = ["1 0 17241709254077376921:0 5:7 6:7 9:12", "4 1\t8:user  5:0 "];
        let batch = parse_lines(r#"["click"]"#, LabelMode::Required, &lines).unwrap();
        assert_eq!(batch.signs, [17_241_709_254_077_376_921, 5, 6, 5, 8]);
        assert_eq!(batch.offsets, [0, 1, 3, 3, 4, 4, 5]);
        assert_eq!(batch.labels, [0.0, 0.25]);
        assert_eq!((batch.shows, batch.clicks), (vec![1, 4], vec![0, 1]));
    }

    #[test]
    fn more_labels_come_as_named_fields() {
        let batch = parse_lines(r#"["click","buy"]"#, LabelMode::Required, &["2 2 buy=1 other=x 5:0"]).unwrap();
        assert_eq!(batch.labels, [1.0, 0.5]);
        let error = |line| parse_lines(r#"["click","buy"]"#, LabelMode::Required, &[line]).unwrap_err();
        assert_eq!(error("1 1 5:0"), "expected 2 labels, each once, got 1");
        assert_eq!(error("1 1 buy=0 buy=1 5:0"), "expected 2 labels, each once, got 3");
        assert_eq!(error("1 1 buy=2 5:0"), "label `buy`: expected a count of at most show = 1, got `2`");
    }

    #[test]
    fn labels_are_passed_over_when_predicting() {
        let batch = parse_lines(r#"["click","buy"]"#, LabelMode::Ignored, &["- - 5:0", "0 0"]).unwrap();
        assert_eq!(batch.signs, [5]);
        assert_eq!(batch.shows, [1, 1]);
    }

    #[test]
    fn bad_lines_are_explained() {
        assert_eq!(error_of("1 0 abx:7"), "slot `7`: sign `abx` is not a u64");
        assert_eq!(error_of("1 0 18446744073709551616:7"), "slot `7`: sign `18446744073709551616` is not a u64");
        assert_eq!(error_of("1 2 5:7"), "click: expected at most show = 1, got 2");
        assert_eq!(error_of("0 0 5:7"), "show: expected at least 1, got 0");
        assert_eq!(error_of("1"), "click: expected a count below 2^32, got ``");
        assert_eq!(error_of("1 0 5"), "expected `sign:slot`, got `5`");
        assert_eq!(error_of("1 0 5:"), "sign `5`: expected a slot after the colon, got nothing");
        assert_eq!(error_of("4294967296 0 5:7"), "show: expected a count below 2^32, got `4294967296`");
    }
}
