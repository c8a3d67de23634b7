//! Texts of the pages about the coding task that are not in its definition.

#[derive(Clone, Copy, Debug)]
pub enum Language {
    English,
    Spanish,
}

/// States and events in Spanish. The definition has the English sentences.
const SPANISH: [(&str, &str); 23] = [
    ("NUEVA", "La tarea se ha creado."),
    ("PLANIFICANDO", "El herrero hace un plan."),
    ("ESPERANDO_APROBACION_PLAN", "El plan espera la decisión de una persona."),
    ("EJECUTANDO_CODIGO", "El herrero escribe el cambio."),
    ("INICIANDO", "El herrero todavía no ha respondido."),
    ("MONITOREANDO_EJECUCION", "El herrero está trabajando y responde."),
    ("PROBANDO_INTEGRACION", "El entorno de pruebas comprueba el cambio."),
    (
        "ESPERANDO_FEEDBACK_INTERNO",
        "Un modelo de lenguaje convierte el fallo en una corrección. Sin modelo, el propio registro es la corrección.",
    ),
    ("COMPLETADA", "Las pruebas han pasado."),
    ("FALLIDA_LOGICA", "Las correcciones no consiguieron que pasaran las pruebas."),
    ("FALLIDA_INFRAESTRUCTURA", "Un servicio no respondió a tiempo o no pudo hacer su parte."),
    ("CANCELADA", "Una persona canceló la tarea, o no hubo decisión a tiempo."),
    ("tarea.crear", "Una tarea nueva."),
    ("tarea.generar_plan", "Pide un plan al herrero."),
    ("resultado.plan_generado", "El herrero ha hecho un plan."),
    ("tarea.aprobar_plan", "Una persona aprueba el plan; Faena comunica la aprobación al herrero."),
    ("resultado.pr_generada", "El herrero ha escrito el cambio."),
    ("tarea.probar_integracion", "Pide al entorno de pruebas que compruebe el cambio."),
    ("resultado.integracion_finalizada", "El entorno de pruebas ha comprobado el cambio."),
    ("tarea.enviar_feedback", "Envía una corrección al herrero."),
    ("tarea.consultar_estado", "Pregunta a un servicio si sigue trabajando."),
    ("resultado.estado_actualizado", "Un servicio sigue trabajando."),
    ("resultado.error", "Un servicio no puede hacer su parte y dice por qué, en vez de callar."),
];

/// Fields of the payloads in English and Spanish.
const FIELDS: [(&str, &str, &str); 13] = [
    ("prompt", "The change to make, in natural language.", "Qué hay que cambiar, descrito con palabras."),
    ("repositorioOrigen", "Path or URL of the git repository.", "Ruta o URL del repositorio git."),
    ("reglas", "Rules of this task.", "Reglas de esta tarea."),
    (
        "reglas.requiereAprobacionPlan",
        "`false` skips the approval of the plan. Default: true.",
        "`false` omite la aprobación del plan. Por omisión: true.",
    ),
    ("planId", "Identifies the plan.", "Identifica el plan."),
    ("plan", "The plan, in any form.", "El plan, en cualquier formato."),
    ("pullRequestUrl", "Where the change is.", "Dónde está el cambio."),
    ("exito", "Whether the tests passed.", "Si las pruebas han pasado."),
    ("log", "Output of the tests.", "Salida de las pruebas."),
    (
        "sessionId",
        "Session id that the smith chose for this task.",
        "Id de sesión que el herrero eligió para esta tarea.",
    ),
    (
        "promptCorreccion",
        "The correction to make, in natural language.",
        "Qué hay que corregir, descrito con palabras.",
    ),
    ("motivo", "Why the service cannot do its part.", "Por qué el servicio no puede hacer su parte."),
    (
        "estado",
        "What the service does. A changed value counts as progress.",
        "Qué hace el servicio. Un valor distinto cuenta como progreso.",
    ),
];

/// Returns the sentence about a state or an event.
pub(super) fn about<'a>(name: &str, english: &'a str, language: Language) -> Option<&'a str> {
    match language {
        Language::English => Some(english),
        Language::Spanish => SPANISH.iter().find(|(known, _)| *known == name).map(|(_, text)| *text),
    }
}

pub(super) fn about_field(path: &str, language: Language) -> Option<&'static str> {
    let (_, english, spanish) = FIELDS.iter().find(|(known, ..)| *known == path)?;
    match language {
        Language::English => Some(english),
        Language::Spanish => Some(spanish),
    }
}
