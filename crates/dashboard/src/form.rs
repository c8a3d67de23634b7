//! Reads the fields of submitted forms.

use axum::{
    extract::{FromRequest, RawForm, Request},
    http::StatusCode,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::Failure;

/// The fields of a form, in their order. A name may occur more than once.
pub struct Fields(pub Vec<(String, String)>);

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Fields, Failure> {
        let RawForm(bytes) = RawForm::from_request(request, state)
            .await
            .map_err(|rejection| Failure::new(rejection.status(), rejection.body_text()))?;
        Ok(Fields(url::form_urlencoded::parse(&bytes).into_owned().collect()))
    }
}

/// A form whose names are the fields of `T`. Fields that `T` does not have are ignored.
pub struct Form<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Form<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Form<T>, Failure> {
        let Fields(fields) = Fields::from_request(request, state).await?;
        let object: Map<String, Value> = fields.into_iter().map(|(name, value)| (name, Value::String(value))).collect();
        let parsed = serde_json::from_value(Value::Object(object));
        parsed.map(Form).map_err(|error| Failure::new(StatusCode::BAD_REQUEST, error.to_string()))
    }
}
