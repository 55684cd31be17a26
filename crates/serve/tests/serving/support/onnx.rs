//! Just enough protobuf to write the graphs that the tests serve: a perceptron whose weights are external data.

/// A message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn int(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    fn message(self, field: u64, value: Message) -> Self {
        self.bytes(field, &value.0)
    }
}

fn node(op: &str, inputs: &[&str], output: &str, attribute: Option<(&str, u64)>) -> Message {
    let node = inputs.iter().fold(Message::default(), |node, input| node.text(1, input)).text(2, output).text(4, op);
    match attribute {
        // type 2 is an integer
        Some((name, value)) => node.message(5, Message::default().text(1, name).int(3, value).int(20, 2)),
        None => node,
    }
}

/// A float tensor whose first dimension is open.
fn value(name: &str, dims: &[usize]) -> Message {
    let batch = Message::default().message(1, Message::default().text(2, "batch"));
    let shape = dims.iter().fold(batch, |shape, &dim| shape.message(1, Message::default().int(1, dim as u64)));
    let tensor = Message::default().int(1, 1).message(2, shape);
    Message::default().text(1, name).message(2, Message::default().message(1, tensor))
}

fn external(name: &str, dims: &[usize], offset: usize) -> Message {
    let entry = |key, value: String| Message::default().text(1, key).text(2, &value);
    let length = 4 * dims.iter().product::<usize>();
    let tensor = dims.iter().fold(Message::default(), |tensor, &dim| tensor.int(1, dim as u64)).int(2, 1).text(8, name);
    tensor
        .message(13, entry("location", "dense.bin".into()))
        .message(13, entry("offset", offset.to_string()))
        .message(13, entry("length", length.to_string()))
        .int(14, 1)
}

/// `scores = sigmoid(… relu([flat pooled, dense] · w0 + b0) … · wn + bn)`; `layers` are the sizes of the outputs.
pub fn perceptron(num_slots: usize, width: usize, num_dense: usize, layers: &[usize]) -> Vec<u8> {
    let mut graph = Message::default().text(2, "test").message(11, value("pooled", &[num_slots, width]));
    let mut nodes = vec![node("Flatten", &["pooled"], "flat", Some(("axis", 1)))];
    let (mut last, mut last_size) = ("flat".to_string(), num_slots * width);
    if num_dense > 0 {
        graph = graph.message(11, value("dense", &[num_dense]));
        nodes.push(node("Concat", &["flat", "dense"], "joined", Some(("axis", 1))));
        (last, last_size) = ("joined".into(), last_size + num_dense);
    }
    let mut offset = 0;
    for (i, &size) in layers.iter().enumerate() {
        let [weight, bias, product, sum, out] = ["w", "b", "p", "s", "o"].map(|name| format!("{name}{i}"));
        graph = graph.message(5, external(&weight, &[last_size, size], offset));
        graph = graph.message(5, external(&bias, &[size], offset + 4 * last_size * size));
        offset += 4 * (last_size + 1) * size;
        nodes.push(node("MatMul", &[&last, &weight], &product, None));
        nodes.push(node("Add", &[&product, &bias], &sum, None));
        let is_last = i + 1 == layers.len();
        let out = if is_last { "scores".into() } else { out };
        nodes.push(node(if is_last { "Sigmoid" } else { "Relu" }, &[&sum], &out, None));
        (last, last_size) = (out, size);
    }
    graph = nodes.into_iter().fold(graph, |graph, node| graph.message(1, node));
    graph = graph.message(12, value("scores", &[last_size]));
    Message::default().int(1, 8).message(7, graph).message(8, Message::default().text(1, "").int(2, 17)).0
}
