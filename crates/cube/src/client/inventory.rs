//! What a server says it holds, checked.

use std::ops::Range;
use std::sync::Arc;

use elasticrec_wire::Inventory;
use serde_json::Value;

use crate::meta::Meta;
use crate::row::RowCodec;
use crate::{Column, RowType};

/// How the rows of a version are laid out.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    meta: Meta,
    codec: RowCodec,
}

impl Layout {
    /// Values in a row.
    pub fn width(&self) -> usize {
        self.codec.width()
    }

    /// Bytes of a stored row.
    pub fn row_bytes(&self) -> usize {
        self.codec.row_bytes()
    }

    /// The type of stored values.
    pub fn row_type(&self) -> RowType {
        self.codec.row_type()
    }

    /// What a row is made of.
    pub fn columns(&self) -> &[Column] {
        &self.meta.columns
    }

    pub(super) fn codec(&self) -> &RowCodec {
        &self.codec
    }
}

/// What a server holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerInventory {
    pub(super) partitions: Range<u32>,
    pub(super) num_partitions: u32,
    /// By version, ascending.
    pub(super) versions: Vec<(u64, Arc<Layout>)>,
    /// How it is, in its own words.
    pub(super) about: String,
}

impl ServerInventory {
    pub(super) fn decode(bytes: &[u8]) -> Result<ServerInventory, String> {
        let holding = Inventory::decode(bytes).map_err(|error| error.to_string())?;
        let layouts: Vec<Value> =
            serde_json::from_slice(holding.layouts).map_err(|error| format!("holding: layouts: {error}"))?;
        let parse = |value: &Value| {
            let meta = Meta::parse("holding", value).map_err(|error| error.to_string())?;
            Ok::<_, String>(Arc::new(Layout { codec: meta.codec(), meta }))
        };
        let layouts: Vec<Arc<Layout>> = layouts.iter().map(parse).collect::<Result<_, _>>()?;
        let layout_of = |[version, place]: &[u64; 2]| {
            let layout = usize::try_from(*place).ok().and_then(|place| layouts.get(place));
            let missing =
                || format!("holding: version {version}: expected one of {} layouts, got {place}", layouts.len());
            Ok::<_, String>((*version, layout.ok_or_else(missing)?.clone()))
        };
        let mut versions: Vec<(u64, Arc<Layout>)> = holding.versions.iter().map(layout_of).collect::<Result<_, _>>()?;
        versions.sort_by_key(|(version, _)| *version);
        let partitions = holding.first_partition..holding.end_partition;
        let about = String::from_utf8_lossy(holding.about).into_owned();
        Ok(ServerInventory { partitions, num_partitions: holding.num_partitions, versions, about })
    }
}

#[cfg(test)]
mod tests {
    use elasticrec_wire::{Body, Header, Kind, read_frame, write_frame};
    use proptest::prelude::*;

    use super::*;

    fn sent(layouts: &str, versions: &[[u64; 2]]) -> Result<ServerInventory, String> {
        let holding = Inventory {
            first_partition: 0,
            end_partition: 3,
            num_partitions: 8,
            model: b"ctr",
            layouts: layouts.as_bytes(),
            versions,
            about: b"",
        };
        let bytes = holding.parts().slices().concat();
        let mut frame = Vec::new();
        write_frame(&mut frame, Header { kind: Kind::Inventory, id: 0 }, &[&bytes]).unwrap();
        let mut body = Body::default();
        read_frame(&mut frame.as_slice(), 1 << 20, &mut body).unwrap();
        ServerInventory::decode(body.bytes())
    }

    #[test]
    fn greetings_that_make_no_sense_are_refused() {
        let layout = r#"{"row_type":"f32","row_bytes":4,"columns":[{"name":"a","width":1}]}"#;
        let held = sent(&format!("[{layout}]"), &[[9, 0], [7, 0]]).unwrap();
        assert_eq!(held.versions.iter().map(|(version, _)| *version).collect::<Vec<_>>(), [7, 9]);
        let told = |layouts: &str, versions: &[[u64; 2]]| sent(layouts, versions).unwrap_err();
        let expected = "holding: version 7: expected one of 1 layouts, got 1";
        assert_eq!(told(&format!("[{layout}]"), &[[7, 1]]), expected);
        assert!(told("[", &[]).starts_with("holding: layouts: "));
        assert!(told(&format!("[{}]", layout.replace('4', "5")), &[]).contains("row_bytes: expected 4, got 5"));
    }

    proptest! {
        #[test]
        fn any_text_and_versions_give_an_answer(layouts in "[\\[\\]{}:,\"a-z0-9]{0,60}", versions: Vec<[u64; 2]>) {
            drop(sent(&layouts, &versions));
        }
    }
}
