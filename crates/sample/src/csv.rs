//! CSV: one record per line, fields in the order of the job or the header; fields may be quoted.

use std::cell::Cell;

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

use crate::batch::BatchBuilder;
use crate::features::{Columns, Features, FeaturesError};
use crate::parser::{LabelMode, Parser, RecordError, excerpt, parse_f32, parse_label};

/// The roles of the fields of a line.
#[derive(Debug)]
pub(crate) struct Fields {
    columns: Columns,
    delimiter: u8,
    /// For each field its roles; a field may have several.
    roles: Vec<Vec<Role>>,
    time: Option<usize>,
}

#[derive(Debug, Clone)]
enum Role {
    Slot { slot: u16, separator: Option<Box<[u8]>> },
    Dense(usize),
    Label(usize),
    Weight,
    Time,
}

impl Fields {
    pub(crate) fn new(features: &Features) -> Result<Self, FeaturesError> {
        let invalid = |message: String| FeaturesError::Invalid(message);
        let Some(columns) = features.columns.clone() else {
            return Err(invalid("columns: required for csv and parquet, got none".into()));
        };
        let delimiter = u8::try_from(columns.delimiter)
            .ok()
            .filter(|byte| byte.is_ascii() && !matches!(byte, b'"' | b'\n' | b'\r'))
            .ok_or_else(|| invalid(format!("delimiter: expected one ASCII character, got `{}`", columns.delimiter)))?;
        let mut fields = Fields { roles: vec![Vec::new(); columns.names.len()], columns, delimiter, time: None };
        for (index, slot) in features.read_slots().iter().enumerate() {
            let separator = slot.separator.as_ref().map(|separator| separator.as_bytes().into());
            fields.assign(slot.column(), Role::Slot { slot: index as u16, separator })?;
        }
        for (index, dense) in features.dense.iter().enumerate() {
            fields.assign(dense.column(), Role::Dense(index))?;
        }
        for (index, label) in features.labels.iter().enumerate() {
            fields.assign(label, Role::Label(index))?;
        }
        if let Some(weight) = fields.columns.weight.clone() {
            fields.assign(&weight, Role::Weight)?;
        }
        if let Some(time) = fields.columns.time.clone() {
            fields.time = Some(fields.assign(&time, Role::Time)?);
        }
        Ok(fields)
    }

    fn assign(&mut self, column: &str, role: Role) -> Result<usize, FeaturesError> {
        let Some(at) = self.columns.names.iter().position(|name| name == column) else {
            return Err(FeaturesError::Invalid(format!("columns: expected a column `{column}`, got none")));
        };
        self.roles[at].push(role);
        Ok(at)
    }

    fn is_null(&self, field: &[u8]) -> bool {
        field.is_empty() || self.columns.null.iter().any(|null| null.as_bytes() == field)
    }

    /// Whether a line is a header.
    pub(crate) fn is_header(&self, line: &[u8]) -> bool {
        let Some(first) = self.columns.names.first().filter(|_| self.columns.header) else {
            return false;
        };
        let start = line.strip_prefix(b"\"").unwrap_or(line);
        if !start.starts_with(first.as_bytes()) {
            return false;
        }
        let mut names = self.columns.names.iter();
        let mut equal = true;
        let whole = split(line, self.delimiter, |_, field| {
            equal &= names.next().is_some_and(|name| name.as_bytes() == field);
            Ok(())
        });
        whole.is_ok() && equal && names.next().is_none()
    }

    pub(crate) fn time_of(&self, line: &[u8]) -> Option<f64> {
        let column = self.time?;
        let mut time = None;
        let read = |at, field: &[u8]| {
            if at == column {
                time = parse_time(field);
            }
            Ok(())
        };
        split(line, self.delimiter, read).ok()?;
        time
    }
}

/// Parses a line into the current sample of `into`; returns (show, click, weight).
#[inline]
pub(crate) fn parse(
    parser: &Parser,
    fields: &Fields,
    line: &[u8],
    mode: LabelMode,
    into: &mut BatchBuilder,
) -> Result<(u32, u32, f32), RecordError> {
    let mut sample = Sample { parser, fields, mode, click: 0, weight: 1.0, into };
    let num_fields = split(line, fields.delimiter, |at, field| {
        fields.roles.get(at).map_or(Ok(()), |roles| roles.iter().try_for_each(|role| sample.set(role, field)))
    })?;
    if num_fields != fields.roles.len() {
        return Err(RecordError(format!("expected {} fields, got {num_fields}", fields.roles.len())));
    }
    Ok((1, sample.click, sample.weight))
}

struct Sample<'a> {
    parser: &'a Parser,
    fields: &'a Fields,
    mode: LabelMode,
    click: u32,
    weight: f32,
    into: &'a mut BatchBuilder,
}

impl Sample<'_> {
    #[inline]
    fn set(&mut self, role: &Role, field: &[u8]) -> Result<(), RecordError> {
        let is_null = self.fields.is_null(field);
        let features = self.parser.features();
        match role {
            Role::Slot { slot, separator: None } if !is_null => self.parser.add_value(*slot, field, self.into),
            Role::Slot { slot, separator: Some(separator) } if !is_null => {
                for value in split_values(field, separator).filter(|value| !value.is_empty()) {
                    self.parser.add_value(*slot, value, self.into);
                }
            }
            &Role::Dense(index) if !is_null => {
                let Some(number) = parse_f32(field) else {
                    let name = &features.dense[index].name;
                    return Err(RecordError(format!("dense `{name}`: expected a number, got `{}`", excerpt(field))));
                };
                self.parser.set_dense(index, number, self.into)?;
            }
            Role::Slot { .. } | Role::Dense(_) => {}
            Role::Label(_) | Role::Weight | Role::Time if self.mode == LabelMode::Ignored => {}
            &Role::Label(index) => {
                let name = &features.labels[index];
                if is_null {
                    return Err(RecordError(format!("label `{name}`: expected a number from 0 to 1, got nothing")));
                }
                let label = parse_label(name, field)?;
                self.into.set_label(index, label);
                self.click = if index == 0 { u32::from(label >= 0.5) } else { self.click };
            }
            Role::Weight => {
                self.weight =
                    parse_f32(field).filter(|weight| *weight > 0.0 && weight.is_finite()).ok_or_else(|| {
                        RecordError(format!("weight: expected a number above 0, got `{}`", excerpt(field)))
                    })?;
            }
            Role::Time => {
                parse_time(field).ok_or_else(|| {
                    RecordError(format!("time: expected seconds since 1970 or a date, got `{}`", excerpt(field)))
                })?;
            }
        }
        Ok(())
    }
}

pub(crate) fn split_values<'a>(field: &'a [u8], separator: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = Some(field);
    std::iter::from_fn(move || {
        let text = rest?;
        match memchr::memmem::find(text, separator) {
            Some(at) => {
                rest = Some(&text[at + separator.len()..]);
                Some(&text[..at])
            }
            None => rest.take(),
        }
    })
}

/// Calls `each` with the fields of a line; returns their number.
#[inline]
fn split(
    line: &[u8],
    delimiter: u8,
    mut each: impl FnMut(usize, &[u8]) -> Result<(), RecordError>,
) -> Result<usize, RecordError> {
    if memchr::memchr(b'"', line).is_some() {
        return split_quoted(line, delimiter, each);
    }
    let (mut start, mut at) = (0, 0);
    for end in memchr::memchr_iter(delimiter, line).chain([line.len()]) {
        each(at, &line[start..end])?;
        start = end + 1;
        at += 1;
    }
    Ok(at)
}

/// The reader of lines with quotes and its buffers.
struct QuotedReader {
    delimiter: u8,
    reader: Reader,
    output: Vec<u8>,
    ends: Vec<usize>,
}

thread_local! {
    // Building a reader takes longer than reading a line, so each thread keeps one.
    static QUOTED_READER: Cell<Option<Box<QuotedReader>>> = const { Cell::new(None) };
}

/// The slow path of `split`, for lines with quotes.
fn split_quoted(
    line: &[u8],
    delimiter: u8,
    each: impl FnMut(usize, &[u8]) -> Result<(), RecordError>,
) -> Result<usize, RecordError> {
    let kept = QUOTED_READER.take().filter(|kept| kept.delimiter == delimiter);
    let mut quoted = kept.unwrap_or_else(|| {
        let reader = ReaderBuilder::new().delimiter(delimiter).build();
        Box::new(QuotedReader { delimiter, reader, output: Vec::new(), ends: Vec::new() })
    });
    let result = quoted.split(line, each);
    QUOTED_READER.set(Some(quoted));
    result
}

impl QuotedReader {
    fn split(
        &mut self,
        line: &[u8],
        mut each: impl FnMut(usize, &[u8]) -> Result<(), RecordError>,
    ) -> Result<usize, RecordError> {
        let QuotedReader { reader, output, ends, .. } = self;
        reader.reset();
        output.resize(output.len().max(line.len() + 1), 0);
        ends.resize(ends.len().max(line.len() + 2), 0);
        let (result, _, _, mut num_ends) = reader.read_record(line, output, ends);
        if result == ReadRecordResult::InputEmpty {
            // An empty read ends the record, unless a quote is open.
            let written = ends[..num_ends].last().copied().unwrap_or(0);
            let (result, _, _, more) = reader.read_record(b"", &mut output[written..], &mut ends[num_ends..]);
            if result != ReadRecordResult::Record {
                return Err(RecordError("expected a closing quote on the same line, got none".into()));
            }
            num_ends += more;
        }
        if line.iter().filter(|&&byte| byte == b'"').count() % 2 == 1 {
            return Err(RecordError("expected a closing quote on the same line, got none".into()));
        }
        let mut start = 0;
        for (at, &end) in ends[..num_ends].iter().enumerate() {
            each(at, &output[start..end])?;
            start = end;
        }
        Ok(num_ends)
    }
}

/// Returns the seconds since 1970 of a number (in milliseconds if it is too large for seconds) or of a date with or
/// without a time. A date without an offset is in UTC.
fn parse_time(text: &[u8]) -> Option<f64> {
    if let Some(number) = parse_f64(text) {
        return Some(if number.abs() > 2e10 { number / 1000.0 } else { number });
    }
    if let Ok(time) = speedate::DateTime::parse_bytes(text) {
        return Some(time.timestamp_tz() as f64 + f64::from(time.time.microsecond) / 1e6);
    }
    speedate::Date::parse_bytes(text).ok().map(|date| date.timestamp() as f64)
}

fn parse_f64(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok().filter(|number: &f64| number.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{sign_of, slot_seed};

    fn parser() -> Parser {
        let features = r#"{"format":"csv","hash":1,
            "slots":[{"name":"user","pooling":"sum"},{"name":"tags","pooling":"sum","separator":"|"},
                     {"name":"seen","pooling":"sum","share":"user","sequence":2,"separator":" ","column":"seen by"}],
            "dense":[{"name":"price","normalize":{"kind":"none"}}],"labels":["click"],
            "columns":{"names":["click","user","tags","price","seen by","w","at","rest"],"header":true,
                       "weight":"w","time":"at","null":["NA"]}}"#;
        Parser::new(Features::from_json(features).unwrap()).unwrap()
    }

    fn parse_one(line: &str, mode: LabelMode) -> Result<crate::Batch, RecordError> {
        let parser = parser();
        let mut builder = parser.builder(1);
        parser.parse_line(line.as_bytes(), mode, &mut builder)?;
        Ok(builder.finish())
    }

    #[test]
    fn every_kind_of_column() {
        let line = "1,ann,a|b||a,2.5,x ann y,3,2026-01-02T00:00:00Z,?";
        let batch = parse_one(line, LabelMode::Required).unwrap();
        let sign = |slot, value: &str| sign_of(slot_seed(slot), value.as_bytes());
        let tag = |value| sign("tags", value);
        assert_eq!(
            batch.signs,
            [sign("user", "ann"), tag("a"), tag("b"), tag("a"), sign("user", "ann"), sign("user", "y")]
        );
        assert_eq!(batch.offsets, [0, 1, 4, 6]);
        assert_eq!((batch.dense, batch.labels), (vec![2.5], vec![1.0]));
        assert_eq!((batch.weights, batch.shows, batch.clicks), (vec![3.0], vec![1], vec![1]));
    }

    #[test]
    fn quotes_and_nulls() {
        let batch = parse_one("0,\"a,\"\"b\"\"\",NA,,,1,0,", LabelMode::Required).unwrap();
        assert_eq!(batch.signs, [sign_of(slot_seed("user"), b"a,\"b\"")]);
        assert_eq!(batch.dense, [0.0]);
        let open = parse_one("0,\"a,b,c,1,,1,0,x", LabelMode::Required).unwrap_err();
        assert_eq!(open.to_string(), "expected a closing quote on the same line, got none");
        // The line with an open quote leaves nothing behind for the next one.
        let next = parse_one("0,\"c\",NA,,,1,0,", LabelMode::Required).unwrap();
        assert_eq!(next.signs, [sign_of(slot_seed("user"), b"c")]);
    }

    #[test]
    fn a_delimiter_may_change_between_lines_with_quotes() {
        let fields = |line: &str, delimiter| {
            let mut fields = Vec::new();
            split(line.as_bytes(), delimiter, |_, field| {
                fields.push(String::from_utf8(field.into()).unwrap());
                Ok(())
            })
            .unwrap();
            fields
        };
        assert_eq!(fields("\"a,b\",c;d", b','), ["a,b", "c;d"]);
        assert_eq!(fields("\"a;b\";c,d", b';'), ["a;b", "c,d"]);
        assert_eq!(fields("\"\",\"x\"", b','), ["", "x"]);
    }

    #[test]
    fn the_header_is_not_a_record() {
        let parser = parser();
        assert!(!parser.is_record(b"click,user,tags,price,seen by,w,at,rest"));
        assert!(!parser.is_record(b"\"click\",\"user\",tags,price,\"seen by\",w,at,rest"));
        assert!(parser.is_record(b"click,user,tags,price,seen by,w,at"));
        assert!(!parser.is_record(b""));
    }

    #[test]
    fn bad_lines_are_errors() {
        let error = |line| parse_one(line, LabelMode::Required).unwrap_err().to_string();
        assert_eq!(error("1,a,b"), "expected 8 fields, got 3");
        assert_eq!(error("NA,a,b,1,,1,0,"), "label `click`: expected a number from 0 to 1, got nothing");
        assert_eq!(error("2,a,b,1,,1,0,"), "label `click`: expected a number from 0 to 1, got `2`");
        assert_eq!(error("1,a,b,dear,,1,0,"), "dense `price`: expected a number, got `dear`");
        assert_eq!(error("1,a,b,inf,,1,0,"), "dense `price`: expected a finite number, got inf");
        assert_eq!(error("1,a,b,1,,0,0,"), "weight: expected a number above 0, got `0`");
        assert_eq!(error("1,a,b,1,,1,soon,"), "time: expected seconds since 1970 or a date, got `soon`");
        assert!(parse_one("?,a,b,1,,?,?,", LabelMode::Ignored).is_ok());
    }

    #[test]
    fn times() {
        let new_year = 1_767_225_600.0;
        for text in ["1767225600", "1767225600000", "2026-01-01", "2026-01-01T00:00:00", "2026-01-01 01:00:00+01:00"] {
            assert_eq!(parse_time(text.as_bytes()), Some(new_year), "{text}");
        }
        assert_eq!(parse_time(b"noon"), None);
        assert_eq!(parser().time_of(b"1,a,b,1,,1,2026-01-01,"), Some(new_year));
    }
}
