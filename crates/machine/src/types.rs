//! Checks the types of expressions as far as the schemas of a definition describe them.

use cel::{
    IdedExpr,
    common::ast::{Expr, LiteralValue},
};
use serde_json::Value;

use crate::{Expression, expression::for_each_part};

/// What is known about a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind<'a> {
    Any,
    Bool,
    Number,
    Text,
    List,
    /// A map, and the JSON Schema of its fields if it is known.
    Map(Option<&'a Value>),
    Null,
}

/// What the variables of an expression contain.
#[derive(Clone, Copy)]
pub struct Scope<'a> {
    /// Schema of the data of a new task.
    pub input: Option<&'a Value>,
    /// Keys of the data that actions set.
    pub set: &'a [&'a str],
    /// Schema of the event's payload.
    pub event: Option<&'a Value>,
}

const FUNCTIONS: [&str; 16] = [
    "size",
    "contains",
    "startsWith",
    "endsWith",
    "matches",
    "string",
    "int",
    "uint",
    "double",
    "bool",
    "bytes",
    "type",
    "dyn",
    "min",
    "max",
    "fingerprint",
];

impl Expression {
    /// Returns what is wrong with the types of this expression; `guard` also requires true or false.
    pub fn type_errors(&self, scope: &Scope<'_>, guard: bool) -> Vec<String> {
        let mut errors = Vec::new();
        let kind = infer(self.syntax(), scope, &mut errors);
        if guard && !matches!(kind, Kind::Any | Kind::Bool) {
            errors.push(format!("a condition must be true or false, this is {}", kind.name()));
        }
        errors.into_iter().map(|error| format!("\"{}\": {error}", self.source())).collect()
    }
}

impl Kind<'_> {
    fn name(self) -> &'static str {
        match self {
            Kind::Any => "a value",
            Kind::Bool => "true or false",
            Kind::Number => "a number",
            Kind::Text => "text",
            Kind::List => "a list",
            Kind::Map(_) => "a map",
            Kind::Null => "null",
        }
    }

    fn may_equal(self, other: Kind<'_>) -> bool {
        matches!((self, other), (Kind::Any | Kind::Null, _) | (_, Kind::Any | Kind::Null))
            || std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }
}

fn infer<'a>(expr: &IdedExpr, scope: &Scope<'a>, errors: &mut Vec<String>) -> Kind<'a> {
    match &expr.expr {
        Expr::Literal(literal) => match literal {
            LiteralValue::Boolean(_) => Kind::Bool,
            LiteralValue::Int(_) | LiteralValue::UInt(_) | LiteralValue::Double(_) => Kind::Number,
            LiteralValue::String(_) => Kind::Text,
            LiteralValue::Null => Kind::Null,
            LiteralValue::Bytes(_) => Kind::Any,
        },
        Expr::Ident(name) => match name.as_str() {
            "now" => Kind::Number,
            "event" => Kind::Map(scope.event),
            "ctx" | "task" | "meta" => Kind::Map(None),
            _ => Kind::Any,
        },
        Expr::Select(select) => {
            let operand = infer(&select.operand, scope, errors);
            let is_ctx = matches!(&select.operand.expr, Expr::Ident(name) if name == "ctx");
            let kind = if is_ctx { ctx_field(&select.field, scope) } else { field(operand, &select.field) };
            match kind {
                Ok(_) if select.test => Kind::Bool,
                Ok(kind) => kind,
                Err(error) => {
                    errors.push(error);
                    if select.test { Kind::Bool } else { Kind::Any }
                }
            }
        }
        Expr::List(_) | Expr::Map(_) | Expr::Struct(_) | Expr::Comprehension(_) => {
            for_each_part(expr, &mut |part| {
                infer(part, scope, errors);
            });
            match expr.expr {
                Expr::List(_) => Kind::List,
                Expr::Map(_) => Kind::Map(None),
                _ => Kind::Any,
            }
        }
        Expr::Call(call) => {
            let target = call.target.as_ref().map(|target| infer(target, scope, errors));
            let arguments: Vec<Kind<'a>> =
                target.into_iter().chain(call.args.iter().map(|part| infer(part, scope, errors))).collect();
            infer_call(&call.func_name, &arguments, errors)
        }
        Expr::Unspecified => Kind::Any,
    }
}

fn infer_call<'a>(function: &str, arguments: &[Kind<'a>], errors: &mut Vec<String>) -> Kind<'a> {
    let mut require = |allowed: &[Kind<'_>], what: &str| {
        for argument in arguments {
            if *argument != Kind::Any && !allowed.iter().any(|kind| kind.may_equal(*argument)) {
                errors.push(format!("{what} cannot be used with {}", argument.name()));
            }
        }
    };
    match function {
        "_&&_" | "_||_" | "!_" => {
            require(&[Kind::Bool], function.trim_matches('_'));
            Kind::Bool
        }
        "_-_" | "_*_" | "_/_" | "_%_" | "-_" => {
            require(&[Kind::Number], function.trim_matches('_'));
            Kind::Number
        }
        "_+_" | "_<_" | "_<=_" | "_>_" | "_>=_" | "_==_" | "_!=_" => infer_pair(function, arguments, errors),
        "_?_:_" => match arguments {
            [_, one, other] if one == other => *one,
            _ => Kind::Any,
        },
        "@in" | "@not_strictly_false" | "contains" | "startsWith" | "endsWith" | "matches" | "bool" => Kind::Bool,
        "size" | "int" | "uint" | "double" => Kind::Number,
        "string" | "fingerprint" => Kind::Text,
        name if name.starts_with(['_', '@']) || FUNCTIONS.contains(&name) => Kind::Any,
        name => {
            errors.push(format!("there is no function \"{name}\"; the functions are {}", FUNCTIONS.join(", ")));
            Kind::Any
        }
    }
}

/// Checks an operator with two sides of the same kind.
fn infer_pair<'a>(function: &str, arguments: &[Kind<'a>], errors: &mut Vec<String>) -> Kind<'a> {
    let operator = function.trim_matches('_');
    let [left, right] = arguments else { return Kind::Any };
    if !left.may_equal(*right) {
        errors.push(format!("{operator} cannot be used with {} and {}", left.name(), right.name()));
    }
    match operator {
        "+" if *left == Kind::Any => *right,
        "+" => *left,
        _ => Kind::Bool,
    }
}

fn ctx_field<'a>(name: &str, scope: &Scope<'a>) -> Result<Kind<'a>, String> {
    if scope.set.contains(&name) {
        return Ok(Kind::Any);
    }
    field(Kind::Map(scope.input), name)
        .map_err(|_| format!("the data has no \"{name}\": neither \"input\" declares it nor does an action set it"))
}

/// Returns the kind of a field, or an error if a schema forbids it.
fn field<'a>(map: Kind<'a>, name: &str) -> Result<Kind<'a>, String> {
    let schema = match map {
        Kind::Map(Some(schema)) => schema,
        Kind::Map(None) | Kind::Any | Kind::Null => return Ok(Kind::Any),
        other => return Err(format!("{} has no field \"{name}\"", other.name())),
    };
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return Ok(Kind::Any) };
    match properties.get(name) {
        Some(property) => Ok(kind_of(property)),
        None if schema.get("additionalProperties") == Some(&Value::Bool(true)) => Ok(Kind::Any),
        None => {
            let known: Vec<&str> = properties.keys().map(String::as_str).collect();
            Err(format!("there is no field \"{name}\"; the schema has {}", known.join(", ")))
        }
    }
}

fn kind_of(schema: &Value) -> Kind<'_> {
    match schema.get("type").and_then(Value::as_str) {
        Some("boolean") => Kind::Bool,
        Some("integer" | "number") => Kind::Number,
        Some("string") => Kind::Text,
        Some("array") => Kind::List,
        Some("object") => Kind::Map(Some(schema)),
        _ => Kind::Any,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_follow_from_schemas_and_literals() {
        let event = json!({"properties": {"ok": {"type": "boolean"}, "log": {"type": "string"},
            "deep": {"type": "object", "properties": {"n": {"type": "integer"}}}}});
        let input = json!({"properties": {"prompt": {"type": "string"}}});
        let scope = Scope { input: Some(&input), set: &["plan"], event: Some(&event) };
        let errors = |source: &str| Expression::compile(source).expect("it is valid").type_errors(&scope, true);
        for valid in [
            "event.ok",
            "event.ok && ctx.plan.approved",
            "event.log == ctx.prompt",
            "event.deep.n + 1 > 2",
            "has(ctx.plan)",
            "ctx.plan",
            "size(event.log) > 3",
            "event.log.contains('x')",
            "fingerprint(event.log) == ctx.plan",
            "ctx.prompt != null",
        ] {
            assert_eq!(errors(valid), Vec::<String>::new(), "{valid}");
        }
        for (invalid, part) in [
            ("event.missing", "no field \"missing\""),
            ("event.deep.m == 1", "no field \"m\""),
            ("event.log.n == 1", "text has no field"),
            ("ctx.unknown", "the data has no \"unknown\""),
            ("event.log && true", "&& cannot be used with text"),
            ("event.log == 3", "== cannot be used with text and a number"),
            ("event.log", "must be true or false, this is text"),
            ("missing(event.log)", "no function \"missing\""),
            ("event.ok - 1 > 0", "- cannot be used with true or false"),
        ] {
            let found = errors(invalid);
            assert!(found.iter().any(|error| error.contains(part)), "{invalid}: {found:?}");
        }
    }
}
