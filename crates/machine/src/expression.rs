//! Expressions in CEL: guards, and values computed from the task's data and the event.
//!
//! An expression is compiled once, when its definition is read, and has no side effects. Its variables are `ctx` (the
//! task's data), `event` (the payload of the event), `meta` (its id, type, time and sender), `task` (id, state, counters)
//! and `now` (milliseconds since 1970).

use std::{
    cell::LazyCell,
    collections::HashMap,
    fmt,
    sync::{Arc, LazyLock},
};

use cel::{
    Context, Env, IdedExpr,
    common::ast::{EntryExpr, Expr},
    extractors::This,
    objects::Key,
    parser::PrattParser,
};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::node::Position;

/// Names that an expression may use.
pub const VARIABLES: [&str; 5] = ["ctx", "event", "meta", "task", "now"];

const MAX_BYTES: usize = 2_048;
const MAX_DEPTH: usize = 64;
const MAX_RECURSION: u16 = 64;
const MAX_OPERATORS: usize = 250;
const MAX_COMPREHENSIONS: usize = 2;

static ENVIRONMENT: LazyLock<Arc<Env>> = LazyLock::new(|| Arc::new(Env::stdlib()));

/// A compiled expression with its text.
pub struct Expression {
    source: String,
    syntax: IdedExpr,
    position: Position,
    /// The variables that it mentions. Only these are converted for an evaluation.
    uses: Vec<&'static str>,
    has_fingerprint: bool,
    /// The fields of an expression like `event.a.b`, which needs no evaluation.
    path: Option<Vec<String>>,
}

/// The values of an expression's variables. Each is converted when the first expression uses it.
pub struct Variables<'a> {
    ctx: &'a Value,
    event: &'a Value,
    converted_ctx: LazyValue<'a>,
    converted_event: LazyValue<'a>,
    meta: LazyValue<'a>,
    task: LazyValue<'a>,
    now: i64,
}

type LazyValue<'a> = LazyCell<cel::Value, Box<dyn FnOnce() -> cel::Value + 'a>>;

fn lazy<'a>(make: impl FnOnce() -> cel::Value + 'a) -> LazyValue<'a> {
    LazyCell::new(Box::new(make))
}

impl<'a> Variables<'a> {
    /// `meta` and `task` are called if an expression uses these variables.
    pub fn new(
        ctx: &'a Value,
        event: &'a Value,
        meta: impl FnOnce() -> Value + 'a,
        task: impl FnOnce() -> Value + 'a,
        now: i64,
    ) -> Variables<'a> {
        Variables {
            ctx,
            event,
            converted_ctx: lazy(|| to_cel(ctx)),
            converted_event: lazy(|| to_cel(event)),
            meta: lazy(|| to_cel(&meta())),
            task: lazy(|| to_cel(&task())),
            now,
        }
    }

    fn value(&self, name: &str) -> cel::Value {
        match name {
            "ctx" => self.converted_ctx.clone(),
            "event" => self.converted_event.clone(),
            "meta" => self.meta.clone(),
            "task" => self.task.clone(),
            _ => cel::Value::Int(self.now),
        }
    }

    /// Returns the value at a path, if it is there and CEL would return it unchanged.
    fn at(&self, path: &[String]) -> Option<&Value> {
        let (root, fields) = path.split_first()?;
        let root = if root == "ctx" { self.ctx } else { self.event };
        let found = fields.iter().try_fold(root, |value, field| value.as_object()?.get(field))?;
        is_same_in_cel(found).then_some(found)
    }
}

/// Returns whether a value stays the same if it is converted to CEL and back.
fn is_same_in_cel(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_i64() || number.is_f64(),
        Value::Array(items) => items.iter().all(is_same_in_cel),
        Value::Object(entries) => entries.values().all(is_same_in_cel),
        Value::Null | Value::Bool(_) | Value::String(_) => true,
    }
}

impl Expression {
    /// Compiles an expression, or returns what is wrong with it.
    pub fn compile(source: &str) -> Result<Expression, String> {
        if source.len() > MAX_BYTES {
            return Err(format!("an expression may have at most {MAX_BYTES} bytes, this one has {}", source.len()));
        }
        // The parser recurses, so the nesting is limited before it runs.
        let (depth_of_brackets, operators) = nesting(source);
        if depth_of_brackets > MAX_DEPTH {
            return Err(format!("an expression may be nested at most {MAX_DEPTH} deep"));
        }
        if operators > MAX_OPERATORS {
            return Err(format!("an expression may have at most {MAX_OPERATORS} operators, this one has {operators}"));
        }
        let syntax = parse(source).map_err(|first| format!("\"{source}\" is not a valid expression: {first}"))?;
        let expression = Expression::of(source, syntax);
        // Evaluation recurses too, and a chain such as `a.b.c` nests without brackets.
        if depth(&expression.syntax) > MAX_DEPTH {
            return Err(format!("an expression may be nested at most {MAX_DEPTH} deep"));
        }
        expression.check_names()?;
        if comprehension_depth(&expression.syntax) > MAX_COMPREHENSIONS {
            return Err(format!("all, exists, map and filter may be nested at most {MAX_COMPREHENSIONS} deep"));
        }
        Ok(expression)
    }

    fn of(source: &str, syntax: IdedExpr) -> Expression {
        let (mut uses, mut has_fingerprint, mut open) = (Vec::new(), false, vec![&syntax]);
        while let Some(part) = open.pop() {
            match &part.expr {
                Expr::Ident(name) => uses.extend(VARIABLES.iter().find(|known| *known == name)),
                Expr::Call(call) => has_fingerprint |= call.func_name == "fingerprint",
                _ => {}
            }
            for_each_part(part, &mut |inner| open.push(inner));
        }
        uses.sort_unstable();
        uses.dedup();
        let path = path(&syntax);
        Expression { source: source.to_owned(), syntax, position: Position::default(), uses, has_fingerprint, path }
    }

    /// Sets the position of the expression in the text of its definition.
    pub(crate) fn at(self, position: Position) -> Expression {
        Expression { position, ..self }
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    pub(crate) fn position(&self) -> Position {
        self.position
    }

    pub(crate) fn syntax(&self) -> &IdedExpr {
        &self.syntax
    }

    fn check_names(&self) -> Result<(), String> {
        let mut unknown = Vec::new();
        unknown_variables(&self.syntax, &mut Vec::new(), &mut unknown);
        if let Some(name) = unknown.first() {
            return Err(format!("\"{}\" uses \"{name}\"; the variables are {}", self.source, VARIABLES.join(", ")));
        }
        Ok(())
    }

    /// Evaluates the expression.
    pub fn evaluate(&self, variables: &Variables<'_>) -> Result<Value, String> {
        if let Some(value) = self.path.as_ref().and_then(|path| variables.at(path)) {
            return Ok(value.clone());
        }
        let mut context = Context::with_env(ENVIRONMENT.clone());
        for name in &self.uses {
            context.add_variable_from_value(*name, variables.value(name));
        }
        let failed = |error: &dyn fmt::Display| format!("\"{}\": {error}", self.source);
        if self.has_fingerprint {
            context
                .add_function("fingerprint", |This(text): This<Arc<String>>| fingerprint(&text))
                .map_err(|e| failed(&e))?;
        }
        let value = cel::Value::resolve(&self.syntax, &context).map_err(|error| failed(&error))?;
        value.json().map_err(|_| failed(&"the result cannot be written as JSON"))
    }

    /// Evaluates a guard. A guard must be true or false.
    pub fn is_true(&self, variables: &Variables<'_>) -> Result<bool, String> {
        match self.evaluate(variables)? {
            Value::Bool(result) => Ok(result),
            other => Err(format!("\"{}\" is {other}, not true or false", self.source)),
        }
    }
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Expression({:?})", self.source)
    }
}

/// A value of a definition whose texts are expressions.
#[derive(Debug)]
pub enum Template {
    Constant(Value),
    Expression(Expression),
    List(Vec<Template>),
    Map(Vec<(String, Template)>),
}

impl Template {
    pub fn evaluate(&self, variables: &Variables<'_>) -> Result<Value, String> {
        match self {
            Template::Constant(value) => Ok(value.clone()),
            Template::Expression(expression) => expression.evaluate(variables),
            Template::List(items) => items.iter().map(|item| item.evaluate(variables)).collect(),
            Template::Map(entries) => {
                entries.iter().map(|(key, value)| Ok((key.clone(), value.evaluate(variables)?))).collect()
            }
        }
    }

    /// Calls `visit` with every expression.
    pub fn for_each_expression<'a>(&'a self, visit: &mut impl FnMut(&'a Expression)) {
        match self {
            Template::Constant(_) => {}
            Template::Expression(expression) => visit(expression),
            Template::List(items) => items.iter().for_each(|item| item.for_each_expression(visit)),
            Template::Map(entries) => entries.iter().for_each(|(_, value)| value.for_each_expression(visit)),
        }
    }
}

/// Converts JSON so that every whole number is an `int`: CEL does not add an `int` to a `uint`.
pub(crate) fn to_cel(value: &Value) -> cel::Value {
    match value {
        Value::Null => cel::Value::Null,
        Value::Bool(value) => cel::Value::Bool(*value),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => cel::Value::Int(whole),
            (None, Some(float)) => cel::Value::Float(float),
            (None, None) => cel::Value::Null,
        },
        Value::String(text) => cel::Value::String(Arc::new(text.clone())),
        Value::Array(items) => cel::Value::List(Arc::new(items.iter().map(to_cel).collect())),
        Value::Object(entries) => {
            let map: HashMap<Key, cel::Value> =
                entries.iter().map(|(key, value)| (Key::String(Arc::new(key.clone())), to_cel(value))).collect();
            cel::Value::Map(cel::objects::Map { map: Arc::new(map) })
        }
    }
}

/// Returns a short hash of a text. Logs that differ only in numbers, ids and times have the same hash.
fn fingerprint(text: &str) -> String {
    let mut normal = String::with_capacity(text.len());
    for word in text.split(|character: char| !character.is_alphanumeric()) {
        if !word.is_empty() && !word.contains(|character: char| character.is_ascii_digit()) {
            normal.push_str(word);
            normal.push(' ');
        }
    }
    Sha256::digest(normal.as_bytes()).iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}

/// Parses an expression, or returns the first error.
///
/// `Env::compile` would use the parser that ANTLR generates, which needs 170 KiB of stack for each pair of brackets in a debug
/// build and adds megabytes to the binary.
fn parse(source: &str) -> Result<IdedExpr, String> {
    let parser = PrattParser::new().max_recursion_depth(MAX_RECURSION);
    parser.parse(source).map_err(|errors| errors.errors.first().map(|error| error.msg.clone()).unwrap_or_default())
}

/// Returns upper bounds of the nesting: the depth of brackets, and the number of operators, which nest without brackets in
/// `a.b.c` and `1 + 2 + 3`.
fn nesting(source: &str) -> (usize, usize) {
    let (mut depth, mut deepest, mut operators) = (0_usize, 0, 0);
    let mut quote = None;
    let mut bytes = source.bytes();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (Some(_), b'\\') => drop(bytes.next()),
            (Some(open), _) if open == byte => quote = None,
            (Some(_), _) => {}
            (None, b'\'' | b'"') => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth = depth.saturating_sub(1),
            (None, b'.' | b'+' | b'-' | b'*' | b'/' | b'%' | b'!' | b'?' | b'<' | b'>' | b'=' | b'&' | b'|') => {
                operators += 1
            }
            _ => {}
        }
        operators += usize::from(quote.is_none() && byte == b'[');
        deepest = deepest.max(depth);
    }
    (deepest, operators)
}

/// Returns how deep the parts of an expression are nested.
fn depth(expression: &IdedExpr) -> usize {
    let (mut deepest, mut open) = (0, vec![(expression, 1)]);
    while let Some((part, depth)) = open.pop() {
        deepest = deepest.max(depth);
        for_each_part(part, &mut |inner| open.push((inner, depth + 1)));
    }
    deepest
}

/// Returns the names in an expression that is a field of `ctx` or `event`, the variable first.
fn path(expression: &IdedExpr) -> Option<Vec<String>> {
    match &expression.expr {
        Expr::Ident(name) if name == "ctx" || name == "event" => Some(vec![name.clone()]),
        Expr::Select(select) if !select.test => {
            let mut names = path(&select.operand)?;
            names.push(select.field.clone());
            Some(names)
        }
        _ => None,
    }
}

/// Calls `visit` with every direct part of an expression.
pub(crate) fn for_each_part<'a>(expr: &'a IdedExpr, visit: &mut dyn FnMut(&'a IdedExpr)) {
    match &expr.expr {
        Expr::Call(call) => {
            call.target.iter().for_each(|target| visit(target));
            call.args.iter().for_each(visit);
        }
        Expr::Comprehension(fold) => {
            for part in [&fold.iter_range, &fold.accu_init, &fold.loop_cond, &fold.loop_step, &fold.result] {
                visit(part);
            }
        }
        Expr::List(list) => list.elements.iter().for_each(visit),
        Expr::Map(map) => map.entries.iter().for_each(|entry| visit_entry(&entry.expr, visit)),
        Expr::Struct(fields) => fields.entries.iter().for_each(|entry| visit_entry(&entry.expr, visit)),
        Expr::Select(select) => visit(&select.operand),
        Expr::Ident(_) | Expr::Literal(_) | Expr::Unspecified => {}
    }
}

fn visit_entry<'a>(entry: &'a EntryExpr, visit: &mut dyn FnMut(&'a IdedExpr)) {
    match entry {
        EntryExpr::StructField(field) => visit(&field.value),
        EntryExpr::MapEntry(entry) => {
            visit(&entry.key);
            visit(&entry.value);
        }
    }
}

fn comprehension_depth(expr: &IdedExpr) -> usize {
    let mut deepest = 0;
    for_each_part(expr, &mut |part| deepest = deepest.max(comprehension_depth(part)));
    deepest + usize::from(matches!(expr.expr, Expr::Comprehension(_)))
}

fn unknown_variables<'a>(expr: &'a IdedExpr, local: &mut Vec<&'a str>, unknown: &mut Vec<&'a str>) {
    match &expr.expr {
        Expr::Ident(name) if !VARIABLES.contains(&name.as_str()) && !local.contains(&name.as_str()) => {
            unknown.push(name);
        }
        Expr::Comprehension(fold) => {
            let before = local.len();
            local.extend([fold.iter_var.as_str(), fold.accu_var.as_str()]);
            local.extend(fold.iter_var2.as_deref());
            for_each_part(expr, &mut |part| unknown_variables(part, local, unknown));
            local.truncate(before);
        }
        _ => for_each_part(expr, &mut |part| unknown_variables(part, local, unknown)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn evaluate(source: &str) -> Result<Value, String> {
        let ctx = json!({"n": 3, "big": 9_007_199_254_740_993_i64, "tags": ["a", "b"], "ratio": 0.5});
        let event = json!({"log": "error 17 at 2026-01-01T10:00:00"});
        let task = json!({"counters": {"rounds": 2}});
        let variables = Variables::new(&ctx, &event, || Value::Null, || task.clone(), 1_000);
        Expression::compile(source)?.evaluate(&variables)
    }

    #[test]
    fn expressions_see_data_event_counters_and_time() {
        assert_eq!(evaluate("ctx.n + 1"), Ok(json!(4)), "whole numbers can be added");
        assert_eq!(evaluate("ctx.big"), Ok(json!(9_007_199_254_740_993_i64)));
        assert_eq!(evaluate("ctx.tags.exists(tag, tag == 'b') && task.counters.rounds < 3"), Ok(json!(true)));
        assert_eq!(evaluate("now + 5"), Ok(json!(1_005)));
        assert_eq!(evaluate("{'a': ctx.ratio, 'b': has(ctx.missing)}"), Ok(json!({"a": 0.5, "b": false})));
    }

    #[test]
    fn a_field_is_read_without_cel_and_gives_the_same_value() {
        let ctx = json!({"a": {"b": [1, 2.5, null, "x", {"c": true}]}, "big": u64::MAX});
        let variables = || Variables::new(&ctx, &ctx, || Value::Null, || Value::Null, 0);
        for source in ["ctx.a", "event.a.b", "ctx", "ctx.big", "ctx.a.missing", "ctx.missing.b", "has(ctx.a)"] {
            let fast = Expression::compile(source).expect(source);
            let slow = Expression { path: None, ..Expression::compile(source).expect(source) };
            assert_eq!(fast.evaluate(&variables()), slow.evaluate(&variables()), "{source}");
        }
        assert!(Expression::compile("event.a.b").expect("valid").path.is_some_and(|path| path == ["event", "a", "b"]));
        assert!(Expression::compile("has(ctx.a)").expect("valid").path.is_none());
    }

    #[test]
    fn a_fingerprint_ignores_numbers_and_times() {
        let same = "fingerprint(event.log) == fingerprint('error 18 at 2027-12-31T09:01:02')";
        assert_eq!(evaluate(same), Ok(json!(true)));
        assert_eq!(evaluate("fingerprint(event.log) == fingerprint('another error')"), Ok(json!(false)));
    }

    #[test]
    fn invalid_expressions_are_rejected_when_they_are_compiled() {
        let long = format!("'{}'", "x".repeat(3_000));
        let deep = format!("{}1{}", "(".repeat(500), ")".repeat(500));
        let nested = "ctx.a.map(x, x.map(y, y.map(z, z)))";
        for (source, part) in [
            ("ctx.n +", "not a valid expression"),
            ("other.n", "uses \"other\""),
            (&long, "at most 2048 bytes"),
            (&deep, "at most 64 deep"),
            (nested, "at most 2 deep"),
        ] {
            let error = Expression::compile(source).expect_err("an error");
            assert!(error.contains(part), "{source}: {error}");
        }
    }

    #[test]
    fn an_error_at_run_time_names_the_expression() {
        let error = evaluate("ctx.missing.field").expect_err("an error");
        assert!(error.starts_with("\"ctx.missing.field\": "), "{error}");
        assert!(evaluate("1 / (ctx.n - 3)").is_err());
    }
}
