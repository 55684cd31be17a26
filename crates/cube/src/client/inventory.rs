//! The inventory of a server, checked: its partitions, its versions and their row layouts.

use std::ops::Range;
use std::sync::Arc;

use elasticrec_wire::Inventory;
use serde_json::Value;

use crate::meta::Meta;
use crate::row::RowCodec;
use crate::{Column, RowType};

/// The layout of a version's rows.
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

    /// The columns of a row.
    pub fn columns(&self) -> &[Column] {
        &self.meta.columns
    }

    pub(super) fn codec(&self) -> &RowCodec {
        &self.codec
    }
}

/// The inventory that a server reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerInventory {
    pub(super) partitions: Range<u32>,
    pub(super) num_partitions: u32,
    /// The versions with their layouts, ascending.
    pub(super) versions: Vec<(u64, Arc<Layout>)>,
    /// The server's description of itself.
    pub(super) about: String,
}

impl ServerInventory {
    pub(super) fn decode(bytes: &[u8]) -> Result<ServerInventory, String> {
        let inventory = Inventory::decode(bytes).map_err(|error| error.to_string())?;
        let layouts: Vec<Value> =
            serde_json::from_slice(inventory.layouts).map_err(|error| format!("inventory: layouts: {error}"))?;
        let parse = |value: &Value| {
            let meta = Meta::parse("inventory", value).map_err(|error| error.to_string())?;
            Ok::<_, String>(Arc::new(Layout { codec: meta.codec(), meta }))
        };
        let layouts: Vec<Arc<Layout>> = layouts.iter().map(parse).collect::<Result<_, _>>()?;
        let layout_of = |[version, index]: &[u64; 2]| {
            let layout = usize::try_from(*index).ok().and_then(|index| layouts.get(index));
            let missing =
                || format!("inventory: version {version}: expected one of {} layouts, got {index}", layouts.len());
            Ok::<_, String>((*version, layout.ok_or_else(missing)?.clone()))
        };
        let mut versions: Vec<(u64, Arc<Layout>)> =
            inventory.versions.iter().map(layout_of).collect::<Result<_, _>>()?;
        versions.sort_by_key(|(version, _)| *version);
        let partitions = inventory.first_partition..inventory.end_partition;
        let about = String::from_utf8_lossy(inventory.about).into_owned();
        Ok(ServerInventory { partitions, num_partitions: inventory.num_partitions, versions, about })
    }
}

#[cfg(test)]
mod tests {
    use elasticrec_wire::{Body, Header, Kind, read_frame, write_frame};
    use proptest::prelude::*;

    use super::*;

    fn send_and_decode(layouts: &str, versions: &[[u64; 2]]) -> Result<ServerInventory, String> {
        let inventory = Inventory {
            first_partition: 0,
            end_partition: 3,
            num_partitions: 8,
            model: b"ctr",
            layouts: layouts.as_bytes(),
            versions,
            about: b"",
        };
        let bytes = inventory.parts().slices().concat();
        let mut frame = Vec::new();
        write_frame(&mut frame, Header { kind: Kind::Inventory, id: 0 }, &[&bytes]).unwrap();
        let mut body = Body::default();
        read_frame(&mut frame.as_slice(), 1 << 20, &mut body).unwrap();
        ServerInventory::decode(body.bytes())
    }

    #[test]
    fn invalid_inventories_are_rejected() {
        let layout = r#"{"row_type":"f32","row_bytes":4,"columns":[{"name":"a","width":1}]}"#;
        let held = send_and_decode(&format!("[{layout}]"), &[[9, 0], [7, 0]]).unwrap();
        assert_eq!(held.versions.iter().map(|(version, _)| *version).collect::<Vec<_>>(), [7, 9]);
        let error = |layouts: &str, versions: &[[u64; 2]]| send_and_decode(layouts, versions).unwrap_err();
        let expected = "inventory: version 7: expected one of 1 layouts, got 1";
        assert_eq!(error(&format!("[{layout}]"), &[[7, 1]]), expected);
        assert!(error("[", &[]).starts_with("inventory: layouts: "));
        assert!(error(&format!("[{}]", layout.replace('4', "5")), &[]).contains("row_bytes: expected 4, got 5"));
    }

    proptest! {
        #[test]
        fn any_text_and_versions_can_be_decoded(layouts in "[\\[\\]{}:,\"a-z0-9]{0,60}", versions: Vec<[u64; 2]>) {
            drop(send_and_decode(&layouts, &versions));
        }
    }
}
