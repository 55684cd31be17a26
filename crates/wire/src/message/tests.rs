use proptest::prelude::*;

use super::*;
use crate::frame::{Body, Header, Kind, read_frame, write_frame};

/// Writes a body as a frame and reads it back.
fn sent(parts: &Parts<'_>) -> Body {
    let mut bytes = Vec::new();
    write_frame(&mut bytes, Header { kind: Kind::Push, id: 1 }, &parts.slices()).unwrap();
    let mut body = Body::default();
    read_frame(&mut bytes.as_slice(), 1 << 20, &mut body).unwrap();
    body
}

proptest! {
    #[test]
    fn pushes_survive_a_round_trip(
        numbers: [u64; 4],
        halves: [u32; 3],
        is_last: bool,
        signs in prop::collection::vec((any::<u64>(), any::<[u32; 2]>()), 0..20),
        gradients in prop::collection::vec(-1f32..1.0, 0..50),
        dense in prop::collection::vec(-1f32..1.0, 0..9),
        sums in prop::collection::vec((any::<u32>(), -1f64..1.0), 0..9),
    ) {
        let (signs, counts): (Vec<u64>, Vec<[u32; 2]>) = signs.into_iter().unzip();
        let (sum_indices, sum_values): (Vec<u32>, Vec<f64>) = sums.into_iter().unzip();
        let [epoch, incarnation, unit, checksum] = numbers;
        let [batch, num_samples, seen] = halves;
        let push = Push {
            epoch, incarnation,
            header: PushHeader {
                unit, batch, is_last, checksum, num_samples, seen, weight: 2.5, is_increment: !is_last,
                group: (seen % 2 == 1).then_some(Group { first_unit: unit, num_units: seen }),
            },
            signs: &signs, counts: &counts, gradients: &gradients, dense: &dense,
            sum_indices: &sum_indices, sum_values: &sum_values,
        };
        let body = sent(&push.parts());
        prop_assert_eq!(Push::decode(body.bytes()).unwrap(), push);
        let rows = Rows { incarnation, applied: unit, rows: &gradients, dense: &dense, tails: &[[1, 2, 3]] };
        let body = sent(&rows.parts());
        prop_assert_eq!(Rows::decode(body.bytes()).unwrap(), rows);
        let pull = Pull { epoch, incarnation, after: is_last.then_some((unit, batch)), wants_dense: is_last, wants_state: seen % 2 == 0, signs: &signs };
        let body = sent(&pull.parts());
        prop_assert_eq!(Pull::decode(body.bytes()).unwrap(), pull);
    }

    #[test]
    fn lookups_survive_a_round_trip(version: u64, signs in prop::collection::vec(any::<u64>(), 0..150), row_bytes in 1u32..50, model in "[a-z]{0,20}") {
        let lookup = Lookup { version, signs: &signs };
        let body = sent(&lookup.parts());
        prop_assert_eq!(Lookup::decode(body.bytes()).unwrap(), lookup);
        let rows: Vec<u8> = (0..signs.len() * row_bytes as usize).map(|at| at as u8).collect();
        let present = vec![version; signs.len().div_ceil(64)];
        let result = LookupResult { version, row_bytes, present: &present, rows: &rows, num_signs: signs.len() };
        let body = sent(&result.parts());
        prop_assert_eq!(LookupResult::decode(body.bytes()).unwrap(), result);
        let versions: Vec<[u64; 2]> = signs.iter().map(|sign| [*sign, 0]).collect();
        let inventory = Inventory { first_partition: 1, end_partition: 3, num_partitions: row_bytes + 2, model: model.as_bytes(), layouts: b"[{}]", versions: &versions, about: model.as_bytes() };
        let body = sent(&inventory.parts());
        prop_assert_eq!(Inventory::decode(body.bytes()).unwrap(), inventory);
    }

    #[test]
    fn hostile_bytes_give_errors(bytes in prop::collection::vec(prop::sample::select(vec![0u8, 0, 0, 1, 2, 8, 255]), 0..200)) {
        fuzz_messages(&bytes);
    }
}

#[test]
fn small_messages_survive_a_round_trip() {
    let hello = Hello { run: b"run", token: b"a secret" };
    assert_eq!(Hello::decode(sent(&hello.parts()).bytes()), Ok(hello));
    let welcome = Welcome {
        incarnation: 1,
        epoch: 2,
        first_partition: 3,
        end_partition: 4,
        width: 5,
        num_dense: 6,
        state_width: 7,
        num_dense_states: 8,
    };
    assert_eq!(Welcome::decode(sent(&welcome.parts()).bytes()), Ok(welcome));
    let refusal = Refusal::new(Reason::NotYet, "unit 7 is behind a boundary");
    assert_eq!(Refusal::decode(sent(&refusal.parts()).bytes()), Ok(refusal));
    let query =
        StepQuery { epoch: 1, incarnation: 2, group: Group { first_unit: 3, num_units: 4 }, step: 5, wait_ms: 6 };
    assert_eq!(StepQuery::decode(sent(&query.parts()).bytes()), Ok(query));
    for is_full in [false, true] {
        let status = StepStatus { incarnation: 1, num_applied: 2, is_full };
        assert_eq!(StepStatus::decode(sent(&status.parts()).bytes()), Ok(status));
    }
    for (was_known, non_finite) in [(false, false), (true, false), (false, true), (true, true)] {
        let ack = PushAck { incarnation: 1, applied: 2, was_known, non_finite };
        assert_eq!(PushAck::decode(sent(&ack.parts()).bytes()), Ok(ack));
    }
}

#[test]
fn wrong_lengths_are_rejected() {
    let pull =
        Pull { epoch: 1, incarnation: 2, after: Some((3, 1)), wants_dense: false, wants_state: false, signs: &[4, 5] };
    let mut bytes = pull.parts().slices().concat();
    bytes[32] = 3;
    let mut words = vec![0u64; bytes.len() / 8];
    bytemuck::cast_slice_mut(&mut words).copy_from_slice(&bytes);
    let error = Pull::decode(bytemuck::cast_slice(&words)).unwrap_err();
    assert_eq!(error.to_string(), "pull: expected at least 64 bytes, got 56");
}

#[test]
fn invalid_lookups_and_inventories_are_rejected() {
    let signs = vec![0; MAX_LOOKUP_SIGNS + 1];
    let body = sent(&Lookup { version: 1, signs: &signs }.parts());
    let error = Lookup::decode(body.bytes()).unwrap_err();
    assert_eq!(error.to_string(), "lookup: expected at most 65536 signs, got 65537");
    for (first_partition, end_partition) in [(2, 2), (3, 2), (0, 9)] {
        let inventory = Inventory {
            first_partition,
            end_partition,
            num_partitions: 8,
            model: b"",
            layouts: b"",
            versions: &[],
            about: b"",
        };
        let error = Inventory::decode(sent(&inventory.parts()).bytes()).unwrap_err();
        let expected = format!("inventory: expected partitions from 0 to 8, got {first_partition} to {end_partition}");
        assert_eq!(error.to_string(), expected);
    }
    // The header promises more rows than the body has.
    let mut bytes = [0u64; 2];
    bytes[1] = u64::MAX;
    let error = LookupResult::decode(bytemuck::cast_slice(&bytes)).unwrap_err();
    assert!(error.to_string().starts_with("lookup result: expected at most 16 bytes in an array"), "{error}");
}
