//! Who answers for which model: models by name, each with one variant or several, each of which has a version at work.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::deployment::Deployment;
use crate::refusal::Refusal;

/// A model that a server is started for.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPlan {
    /// What requests call it.
    pub name: String,
    /// What it is made of; one without a name where there are no others.
    pub variants: Vec<VariantPlan>,
}

/// A variant of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct VariantPlan {
    /// What answers call it; empty for the only one.
    pub name: String,
    /// Its share of the requests, against those of the others.
    pub weight: f64,
}

impl ModelPlan {
    /// A model with one variant.
    pub fn alone(name: impl Into<String>) -> ModelPlan {
        ModelPlan { name: name.into(), variants: vec![VariantPlan { name: String::new(), weight: 1.0 }] }
    }
}

/// Why the models of a server make no sense.
#[derive(Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum PlanError {
    #[error("models: expected at least one, got none")]
    NoModels,
    #[error("model `{0}`: is given twice")]
    Twice(String),
    #[error("model `{model}`: variants: {what}")]
    Variants { model: String, what: String },
    #[error("model `{model}`: no variant `{variant}`")]
    NoVariant { model: String, variant: String },
    #[error("no model `{0}`")]
    NoModel(String),
}

/// All models of a server, fixed when it starts; their versions come and go.
pub(crate) struct Registry {
    models: BTreeMap<String, Entry>,
    /// The one that was given first, which faces without a name ask.
    first: String,
}

/// A model.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) variants: Vec<Variant>,
    /// Requests without a key so far.
    turn: AtomicU64,
    seed: u64,
}

/// A variant of a model, and the version that its new requests get.
pub(crate) struct Variant {
    pub(crate) name: String,
    /// Where its share of all keys ends.
    end: f64,
    current: RwLock<Option<Arc<Deployment>>>,
}

/// What a request says of who should answer it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choice<'a> {
    /// The model; the first one if it names none.
    pub(crate) model: Option<&'a str>,
    /// A variant by name, whatever its weight.
    pub(crate) variant: Option<&'a str>,
    /// Requests with the same key get the same variant.
    pub(crate) key: Option<&'a [u8]>,
    /// The version it must be.
    pub(crate) version: Option<u64>,
}

impl Registry {
    pub(crate) fn new(plans: &[ModelPlan]) -> Result<Registry, PlanError> {
        let first = plans.first().ok_or(PlanError::NoModels)?.name.clone();
        let mut models = BTreeMap::new();
        for plan in plans {
            if models.insert(plan.name.clone(), Entry::new(plan)?).is_some() {
                return Err(PlanError::Twice(plan.name.clone()));
            }
        }
        Ok(Registry { models, first })
    }

    pub(crate) fn models(&self) -> impl Iterator<Item = &Entry> {
        self.models.values()
    }

    /// The model called so, or the first.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<&Entry, Refusal> {
        self.models.get(name.unwrap_or(&self.first)).ok_or_else(|| {
            let known = self.models.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            Refusal::Unknown(format!("no model `{}`, there is {known}", name.unwrap_or_default()))
        })
    }

    /// The version that answers a request.
    pub(crate) fn choose(&self, choice: Choice<'_>) -> Result<Arc<Deployment>, Refusal> {
        let entry = self.model(choice.model)?;
        // a version that is asked for must not depend on whose turn it is
        let by_version = choice.version.filter(|_| choice.variant.is_none()).and_then(|version| entry.with(version));
        let variant = match by_version {
            Some(variant) => variant,
            None => entry.variant(choice.variant, choice.key)?,
        };
        let current = variant.current().ok_or_else(|| entry.not_ready(variant))?;
        match choice.version {
            Some(version) if version != current.about.version => Err(Refusal::Unknown(format!(
                "model `{}`: no version {version}, there is {}",
                entry.name, current.about.version
            ))),
            _ => Ok(current),
        }
    }

    /// Whether every variant of every model has a version that is warm.
    pub(crate) fn ready(&self) -> Result<(), Refusal> {
        self.models().try_for_each(Entry::ready)
    }

    /// The variant for a version to be installed.
    pub(crate) fn place(&self, model: &str, variant: &str) -> Result<&Variant, PlanError> {
        let entry = self.models.get(model).ok_or_else(|| PlanError::NoModel(model.into()))?;
        let found = entry.variants.iter().find(|known| known.name == variant);
        found.ok_or_else(|| PlanError::NoVariant { model: model.into(), variant: variant.into() })
    }

    /// Every version at work.
    pub(crate) fn deployments(&self) -> impl Iterator<Item = Arc<Deployment>> {
        self.models().flat_map(|entry| &entry.variants).filter_map(Variant::current)
    }
}

impl Entry {
    /// The first variant that has a version at work.
    fn with(&self, version: u64) -> Option<&Variant> {
        self.variants.iter().find(|variant| variant.current().is_some_and(|at_work| at_work.about.version == version))
    }

    fn new(plan: &ModelPlan) -> Result<Entry, PlanError> {
        let wrong = |what: String| Err(PlanError::Variants { model: plan.name.clone(), what });
        let variants = &plan.variants;
        if let Some(variant) = variants.iter().find(|variant| !variant.weight.is_finite() || variant.weight < 0.0) {
            return wrong(format!("`{}`: expected a weight from 0 on, got {}", variant.name, variant.weight));
        }
        let total: f64 = variants.iter().map(|variant| variant.weight).sum();
        if total <= 0.0 {
            return wrong("expected at least one with a weight above 0".into());
        }
        for (at, variant) in variants.iter().enumerate() {
            if variants.len() > 1 && variant.name.is_empty() {
                return wrong("expected a name for each of several, got an empty one".into());
            }
            if variants[..at].iter().any(|before| before.name == variant.name) {
                return wrong(format!("`{}` is given twice", variant.name));
            }
        }
        let mut end = 0.0;
        let variants = variants.iter().map(|variant| {
            end += variant.weight / total;
            Variant { name: variant.name.clone(), end, current: RwLock::default() }
        });
        let seed = xxh3_64_with_seed(plan.name.as_bytes(), 0);
        Ok(Entry { name: plan.name.clone(), variants: variants.collect(), turn: AtomicU64::new(0), seed })
    }

    fn variant(&self, name: Option<&str>, key: Option<&[u8]>) -> Result<&Variant, Refusal> {
        if let Some(name) = name {
            return self.variants.iter().find(|variant| variant.name == name).ok_or_else(|| {
                let known = self.variants.iter().filter(|variant| !variant.name.is_empty());
                let known = known.map(|variant| format!("`{}`", variant.name)).collect::<Vec<_>>().join(", ");
                let known = if known.is_empty() { "it has none".into() } else { format!("there is {known}") };
                Refusal::Unknown(format!("model `{}`: no variant `{name}`, {known}", self.name))
            });
        }
        if let [only] = &self.variants[..] {
            return Ok(only);
        }
        let bits = match key {
            Some(key) => xxh3_64_with_seed(key, self.seed),
            // multiples of the golden ratio: after any number of requests each variant has had its share
            None => self.turn.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        let place = bits as f64 / 2f64.powi(64);
        // the sum of the shares may be a little less than 1: what is beyond it is the last one's that has a share
        let chosen = self.variants.iter().find(|variant| place < variant.end);
        Ok(chosen.unwrap_or_else(|| self.last_with_a_share()))
    }

    fn last_with_a_share(&self) -> &Variant {
        let mut last = &self.variants[0];
        let mut before = 0.0;
        for variant in &self.variants {
            if variant.end > before {
                last = variant;
            }
            before = variant.end;
        }
        last
    }

    /// Whether every variant has a version that is warm.
    pub(crate) fn ready(&self) -> Result<(), Refusal> {
        match self.variants.iter().find(|variant| variant.current().is_none()) {
            Some(variant) => Err(self.not_ready(variant)),
            None => Ok(()),
        }
    }

    fn not_ready(&self, variant: &Variant) -> Refusal {
        Refusal::Unavailable(format!("{}: no version is ready yet", Called { entry: self, variant }))
    }
}

/// A variant in words.
struct Called<'a> {
    entry: &'a Entry,
    variant: &'a Variant,
}

impl fmt::Display for Called<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "model `{}`", self.entry.name)?;
        if self.variant.name.is_empty() { Ok(()) } else { write!(formatter, ", variant `{}`", self.variant.name) }
    }
}

impl Variant {
    /// The version of new requests; none before the first is warm.
    pub(crate) fn current(&self) -> Option<Arc<Deployment>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes `next` the version of new requests and returns the one before, which ends with its last request.
    pub(crate) fn switch(&self, next: Option<Arc<Deployment>>) -> Option<Arc<Deployment>> {
        std::mem::replace(&mut *self.current.write().unwrap_or_else(PoisonError::into_inner), next)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::deployment::Job;
    use crate::face::About;
    use crate::pool::{Pool, Waiting};

    fn plan(weights: &[(&str, f64)]) -> ModelPlan {
        let variants = weights.iter().map(|&(name, weight)| VariantPlan { name: name.into(), weight }).collect();
        ModelPlan { name: "ctr".into(), variants }
    }

    fn shares(weights: &[(&str, f64)], key: impl Fn(u64) -> Option<Vec<u8>>) -> Vec<f64> {
        const NUM: u64 = 20_000;
        let entry = Entry::new(&plan(weights)).unwrap();
        let chosen: Vec<String> =
            (0..NUM).map(|i| entry.variant(None, key(i).as_deref()).unwrap().name.clone()).collect();
        let share = |name: &str| chosen.iter().filter(|chosen| *chosen == name).count() as f64 / NUM as f64;
        weights.iter().map(|(name, _)| share(name)).collect()
    }

    #[test]
    fn shares_are_the_weights_with_and_without_keys() {
        let weights = [("a", 70.0), ("none", 0.0), ("b", 20.0), ("c", 10.0)];
        for key in [|_| None, |i: u64| Some(format!("user-{i}").into_bytes())] {
            for (share, expected) in shares(&weights, key).into_iter().zip([0.7, 0.0, 0.2, 0.1]) {
                assert!((share - expected).abs() < 0.01, "{share} is not {expected}");
            }
        }
    }

    #[test]
    fn a_key_stays_with_its_variant_and_says_nothing_of_other_models() {
        let entry = Entry::new(&plan(&[("a", 1.0), ("b", 1.0)])).unwrap();
        let other = Entry::new(&ModelPlan { name: "rank".into(), ..plan(&[("a", 1.0), ("b", 1.0)]) }).unwrap();
        let of = |entry: &Entry, key: u64| entry.variant(None, Some(&key.to_le_bytes())).unwrap().name.clone();
        let same = (0..1000).filter(|&key| of(&entry, key) == of(&other, key)).count();
        assert!((400..600).contains(&same), "{same}");
        assert!((0..1000).all(|key| of(&entry, key) == of(&entry, key)));
        assert_eq!(entry.variant(Some("b"), Some(b"x")).unwrap().name, "b");
        let unknown = entry.variant(Some("z"), None).map(|_| ()).unwrap_err();
        assert_eq!(unknown.to_string(), "model `ctr`: no variant `z`, there is `a`, `b`");
    }

    #[test]
    fn a_version_that_is_asked_for_is_found_whichever_variant_has_it() {
        let registry = Registry::new(&[plan(&[("a", 1.0), ("b", 1.0)])]).unwrap();
        for (variant, version) in [("a", 3), ("b", 4)] {
            let about = Arc::new(About::new("ctr", variant, version, &["click".into()]));
            let pool = Pool::start(1, vec![|_: Job, _: &Waiting<'_, Job>| ()]).unwrap();
            let deployment = Deployment::new(about, Bytes::new(), pool, 1);
            registry.place("ctr", variant).unwrap().switch(Some(Arc::new(deployment)));
        }
        let chosen = |variant, version| {
            let choice = Choice { model: Some("ctr"), variant, version, key: None };
            registry.choose(choice).map(|deployment| deployment.about.version).map_err(|refusal| refusal.to_string())
        };
        for _ in 0..4 {
            assert_eq!((chosen(None, Some(3)), chosen(None, Some(4))), (Ok(3), Ok(4)));
        }
        assert_eq!(chosen(Some("a"), Some(4)), Err("model `ctr`: no version 4, there is 3".into()));
        assert!(chosen(None, Some(5)).unwrap_err().starts_with("model `ctr`: no version 5, there is "));
    }

    #[test]
    fn plans_that_make_no_sense_are_refused() {
        let told = |plans: &[ModelPlan]| Registry::new(plans).map(|_| ()).unwrap_err().to_string();
        assert_eq!(told(&[]), "models: expected at least one, got none");
        assert_eq!(told(&[ModelPlan::alone("a"), ModelPlan::alone("a")]), "model `a`: is given twice");
        let weight = "model `ctr`: variants: `b`: expected a weight from 0 on, got -1";
        assert_eq!(told(&[plan(&[("a", 1.0), ("b", -1.0)])]), weight);
        let none = "model `ctr`: variants: expected at least one with a weight above 0";
        assert_eq!(told(&[plan(&[("a", 0.0)])]), none);
        assert_eq!(told(&[plan(&[])]), none);
        assert_eq!(told(&[plan(&[("a", 1.0), ("a", 1.0)])]), "model `ctr`: variants: `a` is given twice");
        let nameless = "model `ctr`: variants: expected a name for each of several, got an empty one";
        assert_eq!(told(&[plan(&[("a", 1.0), ("", 1.0)])]), nameless);
    }
}
