//! The meta JSON of a cube file: the columns and the type of its rows.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::CubeError;
use crate::row::{RowCodec, RowType};

/// Longest stored row.
pub(crate) const MAX_ROW_BYTES: usize = 64 << 10;

/// A named group of values in every row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// The model's name for the column.
    pub name: String,
    /// Number of values in a row.
    pub width: u32,
}

/// The meta JSON. Unknown keys are rejected, because they may change the meaning of the rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Meta {
    pub(crate) row_type: RowType,
    row_bytes: u64,
    pub(crate) columns: Vec<Column>,
}

impl Meta {
    pub(crate) fn new(name: &str, columns: Vec<Column>, row_type: RowType) -> Result<Meta, CubeError> {
        let row_bytes = row_bytes(name, &columns, row_type)?;
        Ok(Meta { row_type, row_bytes, columns })
    }

    pub(crate) fn parse(name: &str, meta: &Value) -> Result<Meta, CubeError> {
        // Checked first, so that the error for a later release names the row type instead of keys that come with it.
        let row_type = meta.get("row_type").and_then(Value::as_str);
        if let Some(got) = row_type.filter(|got| RowType::of_name(got).is_none()) {
            return Err(CubeError::RowType { name: name.to_owned(), got: got.to_owned() });
        }
        let meta = Meta::deserialize(meta).map_err(|error| wrong(name, error.to_string()))?;
        let expected = row_bytes(name, &meta.columns, meta.row_type)?;
        if meta.row_bytes != expected {
            return Err(wrong(name, format!("row_bytes: expected {expected}, got {}", meta.row_bytes)));
        }
        Ok(meta)
    }

    pub(crate) fn to_value(&self, name: &str) -> Result<Value, CubeError> {
        serde_json::to_value(self).map_err(|error| wrong(name, error.to_string()))
    }

    pub(crate) fn codec(&self) -> RowCodec {
        RowCodec::new(self.row_type, &self.columns)
    }
}

fn row_bytes(name: &str, columns: &[Column], row_type: RowType) -> Result<u64, CubeError> {
    let mut names = HashSet::new();
    for column in columns {
        if column.width == 0 {
            return Err(wrong(name, format!("column `{}`: expected a width of at least 1, got 0", column.name)));
        }
        if !names.insert(&column.name) {
            return Err(wrong(name, format!("column `{}` is repeated", column.name)));
        }
    }
    let bytes = row_type.row_bytes(columns);
    if bytes == 0 || bytes > MAX_ROW_BYTES as u64 {
        return Err(wrong(name, format!("expected rows of 1 to {MAX_ROW_BYTES} bytes, got {bytes}")));
    }
    Ok(bytes)
}

fn wrong(name: &str, what: String) -> CubeError {
    CubeError::Meta { name: name.to_owned(), what }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(meta: &Value) -> String {
        Meta::parse("part-00000", meta).unwrap_err().to_string()
    }

    #[test]
    fn meta_survives_a_round_trip() {
        let columns = vec![Column { name: "wide".into(), width: 1 }, Column { name: "deep".into(), width: 9 }];
        for (row_type, row_bytes) in [(RowType::F16, 20), (RowType::Int8, 17)] {
            let meta = Meta::new("part-00000", columns.clone(), row_type).unwrap();
            assert_eq!((meta.codec().width(), meta.codec().row_bytes()), (10, row_bytes));
        }
        let meta = Meta::new("part-00000", columns, RowType::F32).unwrap();
        assert_eq!((meta.codec().width(), meta.codec().row_bytes()), (10, 40));
        let value = serde_json::to_value(&meta).unwrap();
        let expected = json!({
            "row_type": "f32",
            "row_bytes": 40,
            "columns": [{"name": "wide", "width": 1}, {"name": "deep", "width": 9}],
        });
        assert_eq!(value, expected);
        assert_eq!(Meta::parse("part-00000", &value).unwrap(), meta);
    }

    #[test]
    fn unknown_row_types_and_keys_are_rejected() {
        let later = json!({"row_type": "int4", "groups": [1], "row_bytes": 1, "columns": [{"name": "a", "width": 1}]});
        assert_eq!(message(&later), "part-00000: row type `int4` is not known, expected `f32`, `f16` or `int8`");
        let key = json!({"row_type": "f32", "delta": 3, "row_bytes": 4, "columns": [{"name": "a", "width": 1}]});
        assert!(message(&key).starts_with("part-00000: meta: unknown field `delta`"), "{}", message(&key));
        assert!(message(&json!([])).starts_with("part-00000: meta: "));
    }

    #[test]
    fn inconsistent_row_sizes_are_rejected() {
        let column = |name: &str, width| json!({"name": name, "width": width});
        for (columns, row_bytes, expected) in [
            (vec![], 0, "expected rows of 1 to 65536 bytes, got 0"),
            (vec![column("a", 0)], 0, "column `a`: expected a width of at least 1, got 0"),
            (vec![column("a", 1), column("a", 1)], 8, "column `a` is repeated"),
            (vec![column("a", 16385)], 65540, "expected rows of 1 to 65536 bytes, got 65540"),
            (vec![column("a", u32::MAX), column("b", u32::MAX)], 4, "expected rows of 1 to 65536 bytes"),
            (vec![column("a", 2)], 4, "row_bytes: expected 8, got 4"),
        ] {
            let meta = json!({"row_type": "f32", "row_bytes": row_bytes, "columns": columns});
            assert!(message(&meta).contains(expected), "{}", message(&meta));
        }
        for (row_type, widest) in [(RowType::F32, 16384), (RowType::F16, 32768), (RowType::Int8, 16384)] {
            let meta = |width| Meta::new("part-00000", vec![Column { name: "a".into(), width }], row_type);
            assert!(meta(widest).is_ok() && meta(widest + 1).is_err(), "{row_type}");
        }
    }
}
